"""A reward server for the oracle `http`: the function `score` of a Python file.

    python examples/reward_server.py my_rewards.py --identity my-rewards@1 --port 8080

The function is ``score(prompts, responses, references)``, as the oracle `python` takes it: one
number per response, None where there is none, or a mapping with the number under ``score``. If
the variable ``REWARD_KEY`` is set, requests must carry its value as a bearer token.
"""

import argparse
import hmac
import json
import os
import runpy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers as docs/oracles.md describes it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        """Scores the responses of a request."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers.get("Authorization", "")
        if KEY and not hmac.compare_digest(token, f"Bearer {KEY}"):
            self.reply(401, {"error": "wrong or missing bearer token"})
            return
        try:
            rows = json.loads(body)["responses"]
            columns = ("messages", "response", "reference_answer")
            scores = SCORE(*([row[name] for row in rows] for name in columns))
            answer = {"oracle": OPTIONS.identity, "scores": [item(score) for score in scores]}
        except Exception as error:
            # The client shows it, and asks again after a 500.
            is_mistake = isinstance(error, (KeyError, TypeError, ValueError))
            self.reply(422 if is_mistake else 500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.reply(200, answer)

    def reply(self, status, value):
        """Sends a JSON document."""
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def item(score):
    """One score of the function as the answer has it."""
    if score is None:
        return {"score": None, "error": "the function returned None"}
    if not hasattr(score, "items"):
        return {"score": float(score), "components": {}}
    values = {name: float(value) for name, value in score.items()}
    if "score" not in values:
        return {"score": None, "error": "the function gave a mapping without 'score'"}
    return {"score": values.pop("score"), "components": values}


if __name__ == "__main__":
    PARSER = argparse.ArgumentParser()
    PARSER.add_argument("file", help="Python file with the function `score`")
    PARSER.add_argument("--identity", required=True, help="name and version of this oracle")
    PARSER.add_argument("--host", default="127.0.0.1")
    PARSER.add_argument("--port", type=int, default=8080)
    OPTIONS = PARSER.parse_args()
    KEY = os.environ.get("REWARD_KEY")
    SCORE = runpy.run_path(OPTIONS.file)["score"]
    SERVER = ThreadingHTTPServer((OPTIONS.host, OPTIONS.port), Handler)
    ACCESS = "with REWARD_KEY" if KEY else "without a key"
    print(f"serving {ACCESS} at http://{OPTIONS.host}:{SERVER.server_port}", flush=True)
    SERVER.serve_forever()
