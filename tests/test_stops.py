"""Stop strings: the token automaton against searching the bytes, the bank of a job, cutting on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import stops
from kvjax.errors import RequestError

BYTES = [bytes([i]) for i in range(256)]
WORDS = ["a", "b", "ab", "ba", "aab", "bab", "é", "ß", "日", "日本", "🙂", "a日b"]
# single bytes too: a stop string may begin in the middle of one token and end in the middle of a character
VOCABULARY = [b"", *BYTES, *(word.encode() for word in WORDS)]
texts = st.text(alphabet="abé日🙂", min_size=1, max_size=5)
tokens = st.lists(
    st.one_of(st.integers(257, len(VOCABULARY) - 1), st.sampled_from([0, *(1 + b for b in "abé日🙂".encode())])),
    max_size=24,
)


def follow(table, stream):
    """States after each token, from the start."""
    states = [0]
    for token in stream:
        states.append(int(table[states[-1], token]))
    return states[1:]


@settings(max_examples=300, deadline=None)
@given(stop_set=st.lists(texts, max_size=4), stream=tokens)
def test_matches_when_the_bytes_contain_a_stop_string(stop_set, stream):
    table = stops.lift(stop_set, VOCABULARY)
    text = b""
    for token, state in zip(stream, follow(table, stream), strict=True):
        text += VOCABULARY[token]
        assert (state == len(table) - 1) == any(text.find(stop.encode()) >= 0 for stop in stop_set)


@settings(max_examples=100, deadline=None)
@given(sets=st.lists(st.lists(texts, max_size=3), min_size=1, max_size=5), streams=st.lists(tokens, min_size=5))
def test_a_bank_follows_each_set_as_alone(sets, streams):
    bank = stops.AutomatonBank(VOCABULARY)
    ids = [bank.add(stop_set) for stop_set in sets]
    table = bank.table()
    for stop_set, number, stream in zip(sets, ids, streams, strict=False):
        alone = stops.lift(stop_set, VOCABULARY)
        want = [state == len(alone) - 1 for state in follow(alone, stream)]
        assert [state == table.shape[1] - 1 for state in follow(table[number], stream)] == want


def test_straddling_and_overlapping_by_hand():
    table = stops.lift(["</s>", "s>x"], [b"<", b"/s", b">", b">>", b"x", b"", b"</s", b"a</s>b"])
    matched = len(table) - 1
    assert follow(table, [0, 1, 2])[-1] == matched, "< /s >"
    assert matched not in follow(table, [0, 1, 4, 2]), "< /s x >"
    assert follow(table, [6, 5, 3])[-1] == matched, "a special token between changes nothing"
    assert follow(table, [1, 2, 4, 0])[2:] == [matched, matched], "the suffix of another's prefix; never left"
    assert follow(table, [7]) == [matched], "inside one token"


def test_one_that_contains_another_costs_no_states():
    assert stops.lift(["b", "abc", "aab"], BYTES).shape == (2, 256)


def test_smallest_dtype():
    assert stops.lift(["x" * 127], BYTES).dtype == np.int8
    assert stops.lift(["x" * 128], BYTES).dtype == np.int16
    assert stops.lift(["x" * 40_000], [b"x"]).dtype == np.int32


def test_no_stop_strings_never_match():
    table = stops.lift([], VOCABULARY)
    assert table.shape == (2, len(VOCABULARY))
    assert not table[0].any()


def test_equal_sets_share_an_automaton_and_shapes_are_powers_of_two():
    bank = stops.AutomatonBank(VOCABULARY)
    assert bank.add([]) == 0
    assert bank.shape == (1, 2, len(VOCABULARY))
    first = bank.add(["ab", "日"])
    assert bank.add(("日", "ab", "ab")) == first == 1
    assert bank.add(["x" * 9]) == 2
    assert len(bank) == 3
    assert bank.table().shape == bank.shape == (4, 16, len(VOCABULARY))
    assert bank.table().dtype == np.int8
    assert (bank.table()[0, :-1] == 0).all(), "0 never matches"


def test_running_states_survive_growth():
    bank = stops.AutomatonBank(VOCABULARY)
    number = bank.add(["ab"])
    a, b = 1 + ord("a"), 1 + ord("b")
    state = bank.table()[number, 0, a]
    bank.add(["a much longer stop string"])
    grown = bank.table()
    assert grown[number, state, b] == grown.shape[1] - 1


def test_a_table_too_large_is_refused_and_the_bank_stays():
    bank = stops.AutomatonBank(BYTES, max_bytes=2 * 16 * 256)
    assert bank.add(["x" * 10]) == 1
    with pytest.raises(RequestError, match=r"^stop \['yyyyy.*\.\.\. would grow the table .* over 0\.0 MB: use fewer"):
        bank.add(["y" * 100])
    assert len(bank) == 2
    assert bank.add(["x" * 10]) == 1


def test_advance_on_the_device():
    bank = stops.AutomatonBank(VOCABULARY)
    numbers = jnp.array([bank.add([]), bank.add(["ab"]), bank.add(["ab"]), bank.add(["日本"])], jnp.int32)
    table = jnp.asarray(bank.table())
    a, b, sun = 1 + ord("a"), 1 + ord("b"), VOCABULARY.index("日".encode())
    state = jnp.zeros(4, jnp.int32)
    advance = jax.jit(stops.advance)
    state, matched = advance(table, numbers, state, jnp.array([a, a, b, sun]))
    assert state.dtype == jnp.int32
    assert matched.tolist() == [False] * 4
    state, matched = advance(table, numbers, state, jnp.array([b, b, a, VOCABULARY.index("日本".encode())]))
    assert matched.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("text", "strings", "want"),
    [
        ("hello", ["x"], ("hello", None)),
        ("hello", [], ("hello", None)),
        ("a\n\nUser: b\n\nUser:", ["User:", "zz"], ("a\n\n", "User:")),
        ("abcd", ["abcd", "bc"], ("a", "bc")),
        ("xabc", ["bc", "abc", "c"], ("x", "abc")),
        ("stop", ["stop"], ("", "stop")),
        ("日本語。次", ["。"], ("日本語", "。")),
    ],
)
def test_cut(text, strings, want):
    assert stops.cut(text, strings) == want


def test_cut_from_a_start():
    assert stops.cut("a.b.c", ["."], start=2) == ("a.b", ".")


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_cut_does_not_depend_on_what_comes_later(text, strings):
    want = stops.cut(text, strings)
    prefixes = [stops.cut(text[:n], strings) for n in range(len(text) + 1)]
    assert next((found for found in prefixes if found[1] is not None), (text, None)) == want


def test_held():
    assert stops.held("the en", ["end.", "nd"]) == 2
    assert stops.held("the x", ["end."]) == 0
    assert stops.held("aa", ["aaab"]) == 2
    assert stops.held("", ["ab"]) == 0
    assert stops.held("abc", []) == 0
