from hypothesis import given
from hypothesis import strategies as st

from stages.evaluate.summary import DistinctCounter

texts = st.lists(st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join), max_size=20)


def by_definition(corpus: list[str], n: int) -> float | None:
    grams = [
        tuple(words[start : start + n])
        for words in (text.split() for text in corpus)
        for start in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else None


@given(corpus=texts, cut=st.integers(0, 20))
def test_agrees_with_the_definition_however_the_corpus_is_cut(corpus, cut):
    counter = DistinctCounter()
    counter.add(corpus[:cut])
    counter.add(corpus[cut:])
    assert counter.per_ngram() == [by_definition(corpus, n) for n in range(1, 5)]
