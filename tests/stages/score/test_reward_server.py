import contextlib
import gzip
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from stages.contract.errors import UserError
from stages.score.remote import RemoteError
from tests.scripted_server import served
from tests.stage_calls import response, score_params

IDENTITY = "length@1"
ROWS = [response(f"question {index}", 0, "word " * index) for index in range(10)]


def lengths(request):
    scores = [{"score": len(row["response"])} for row in request["responses"]]
    return 200, {"oracle": IDENTITY, "scores": scores}


class Trickling(BaseHTTPRequestHandler):
    """Sends a byte of its answer at a time, as long as somebody reads."""

    def do_POST(self):
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                self.wfile.write(b"x")
                threading.Event().wait(0.05)


class Inflating(BaseHTTPRequestHandler):
    """Sends a small body that is hundreds of times as long once decompressed."""

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(gzip.compress(b" " * (64 << 20)))


@pytest.fixture
def score(score_rows):
    def run(url, rows=ROWS, **params):
        defaults = {
            "url": url,
            "identity": IDENTITY,
            "rows_per_request": 3,
            "timeout_seconds": 60.0,
        }
        return score_rows(score_params("http", **{**defaults, **params}), rows)

    return run


def test_scores_come_back_in_order(serve, score):
    server = serve(lambda number, request: lengths(request))
    rows = score(server.url)
    assert [row["score"] for row in rows] == [len(row["response"]) for row in ROWS]
    assert {row["oracle"] for row in rows} == {f"http:{IDENTITY}"}
    assert sorted(len(request["responses"]) for request in server.requests) == [1, 3, 3, 3]
    sent = {row["prompt_id"]: row for request in server.requests for row in request["responses"]}
    first = ROWS[0]
    names = ("prompt_id", "sample_index", "messages", "response", "reference_answer")
    assert sent[first["prompt_id"]] == {name: first[name] for name in names}


class TestFailures:
    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_passing_ones_are_retried(self, serve, score, status):
        server = serve(lambda number, request: (status, {}) if number < 5 else lengths(request))
        rows = score(server.url, concurrency=1)
        assert [row["score"] for row in rows] == [len(row["response"]) for row in ROWS]
        assert len(server.requests) == 4 + 4

    def test_lasting_ones_fail_the_stage_for_a_later_attempt(self, serve, score):
        server = serve(lambda number, request: (500, {"detail": "out of memory"}))
        with pytest.raises(RemoteError, match=r"status 500: .*out of memory"):
            score(server.url, ROWS[:1])
        assert len(server.requests) == 5

    def test_a_slow_answer_is_given_up(self, serve, score):
        def behave(number, request):
            if number == 1:
                server.released.wait()
            return lengths(request)

        server = serve(behave)
        rows = score(server.url, ROWS[:1], timeout_seconds=2)
        assert rows[0]["score"] == len(ROWS[0]["response"])
        assert len(server.requests) == 2

    def test_an_answer_that_trickles_is_given_up(self, score, monkeypatch):
        monkeypatch.setattr("stages.score.remote.ATTEMPTS", 1)
        with served(Trickling) as url, pytest.raises(RemoteError, match="after 2 s"):
            score(url, ROWS[:1], timeout_seconds=2)

    def test_a_compressed_answer_without_end_is_refused(self, score, monkeypatch):
        monkeypatch.setattr("stages.score.remote.LARGEST_ANSWER", 1 << 20)
        with served(Inflating) as url, pytest.raises(UserError, match="longer than 1 MiB"):
            score(url, ROWS[:1])

    def test_no_server_at_all(self, serve, score):
        server = serve(lambda number, request: lengths(request))
        server.shutdown()
        server.server_close()
        with pytest.raises(RemoteError, match="Connection refused"):
            score(server.url)


class TestDisagreements:
    @pytest.mark.parametrize(
        ("answer", "what"),
        [
            ("<html>", "Invalid JSON"),
            ([], "body: Input should be an object"),
            ({"oracle": IDENTITY}, "scores: Field required"),
            ({"oracle": IDENTITY, "scores": [{"score": "1"}]}, "scores.0.score: .*valid number"),
            ({"oracle": IDENTITY, "scores": [{"score": True}]}, "scores.0.score: .*valid number"),
            ('{"oracle": "length@1", "scores": [{"score": NaN}]}', "score"),
            ({"oracle": IDENTITY, "scores": [{"score": None}]}, "either a score or an error"),
            ({"oracle": IDENTITY, "scores": [{"score": 1, "why": "x"}]}, "scores.0.why: Extra"),
            ({"oracle": IDENTITY, "scores": []}, "0 scores for 1 responses"),
            ({"oracle": "width@1", "scores": [{"score": 1}]}, "calls itself 'width@1'"),
        ],
    )
    def test_they_are_named_and_not_retried(self, serve, score, answer, what):
        server = serve(lambda number, request: (200, answer))
        with pytest.raises(UserError, match=what):
            score(server.url, ROWS[:1])
        assert len(server.requests) == 1

    def test_a_wrong_address_is_named(self, serve, score):
        server = serve(lambda number, request: (404, {"detail": "not here"}))
        with pytest.raises(UserError, match=r"status 404: .*not here"):
            score(server.url, ROWS[:1])


class TestKey:
    @pytest.mark.parametrize("exported", ["s3cret", "s3cret\n", " s3cret\r\n"])
    def test_it_is_read_from_the_environment_and_sent(self, serve, score, monkeypatch, exported):
        monkeypatch.setenv("REWARD_KEY", exported)
        server = serve(lambda number, request: lengths(request))
        score(server.url, key_env="REWARD_KEY")
        assert {headers["Authorization"] for headers in server.headers_seen} == {"Bearer s3cret"}

    def test_it_must_be_there(self, score):
        with pytest.raises(UserError, match="REWARD_KEY, and that environment variable is not set"):
            score("http://127.0.0.1:9", key_env="REWARD_KEY")

    @pytest.mark.parametrize("exported", ["s3cret\nsecond", "s3crét", "s3\x7fcret"])
    def test_one_that_no_request_can_carry_is_not_quoted(self, score, monkeypatch, exported):
        monkeypatch.setenv("REWARD_KEY", exported)
        with pytest.raises(UserError, match=r"REWARD_KEY.*printable") as caught:
            score("http://127.0.0.1:9", key_env="REWARD_KEY")
        assert "s3" not in str(caught.value)

    def test_a_refused_one_is_named(self, serve, score, monkeypatch):
        monkeypatch.setenv("REWARD_KEY", "wr0ng")
        server = serve(lambda number, request: (401, {}))
        with pytest.raises(UserError, match="refuses the key") as caught:
            score(server.url, key_env="REWARD_KEY")
        assert "REWARD_KEY" in str(caught.value)
        assert "wr0ng" not in str(caught.value)


def test_after_a_failure_only_the_rest_is_asked(serve, score):
    up = threading.Event()

    def behave(number, request):
        return lengths(request) if number <= 3 or up.is_set() else (500, {})

    server = serve(behave)
    settings = {"rows_per_request": 2, "concurrency": 1}
    with pytest.raises(RemoteError):
        score(server.url, **settings)
    failed = len(server.requests)
    up.set()
    assert [row["score"] for row in score(server.url, **settings)] == [
        len(row["response"]) for row in ROWS
    ]
    repeated = [
        row["prompt_id"] for request in server.requests[failed:] for row in request["responses"]
    ]
    assert repeated == [row["prompt_id"] for row in ROWS[6:]]


def test_responses_without_a_score_are_asked_again(serve, score):
    well = threading.Event()

    def behave(number, request):
        answer = [
            {"score": len(row["response"])}
            if row["sample_index"] or well.is_set()
            else {"score": None, "error": "not now"}
            for row in request["responses"]
        ]
        return 200, {"oracle": IDENTITY, "scores": answer}

    rows = [ROWS[0], response("question 1", 1, "word")]
    server = serve(behave)
    with pytest.raises(UserError, match="not now"):
        score(server.url, rows)
    well.set()
    assert len(score(server.url, rows)) == 2
    assert [len(request["responses"]) for request in server.requests] == [2, 1]
