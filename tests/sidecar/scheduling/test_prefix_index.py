"""The index: what it knows is always a prefix, it is bounded, and its tokens follow what the engine says."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import pytest

from cacheaware_sidecar.prefix_key import CHUNK_BYTES, prefix_key
from cacheaware_sidecar.scheduling import Used, Waiting
from cacheaware_sidecar.scheduling.prefix_index import DEFAULT_CAPACITY, Match, PrefixIndex

BLOCK = 16


def request(text: str, *, tokens: float | None = None, size: float = 16.0, conversation: str | None = None) -> Waiting:
    """One chained chunk a letter."""
    chunks = tuple(text[: end + 1].encode() for end in range(len(text)))
    prompt = len(text) * size if tokens is None else tokens
    return Waiting("r", "gold", "acme", 0.0, prompt, chunks=chunks, chunk_tokens=size, conversation=conversation)


def keyed(prompt: str) -> Waiting:
    """With the key of a real prompt."""
    key = prefix_key("/v1/completions", {"prompt": prompt}, "salt")
    assert key is not None
    return Waiting("r", "gold", "acme", 0.0, len(prompt) / 4, chunks=key.chunks, chunk_tokens=CHUNK_BYTES / 4)


def seen(*texts: str, capacity: int = 1000) -> PrefixIndex:
    index = PrefixIndex(capacity)
    for text in texts:
        index.insert(request(text))
    return index


class TestMatching:
    @pytest.mark.parametrize(
        ("known", "asked", "chunks"),
        [
            pytest.param("", "abc", 0, id="nothing known"),
            pytest.param("abc", "abc", 3, id="all"),
            pytest.param("abcdef", "abcxyz", 3, id="a common start"),
            pytest.param("abc", "abcdef", 3, id="a continuation"),
            pytest.param("abc", "xbc", 0, id="another start"),
            pytest.param("xxbxx", "abxx", 0, id="a block in the middle is no prefix"),
        ],
    )
    def test_the_common_start_counts_and_nothing_else(self, known: str, asked: str, chunks: int) -> None:
        assert seen(known).known.matched(request(asked).chunks) == chunks

    def test_of_two_known_prompts_only_the_one_that_it_starts_with_counts(self) -> None:
        alpha, bravo = (word * 64 for word in ("Alpha ", "Bravo "))
        index = PrefixIndex()
        for text in (alpha, bravo):
            index.insert(keyed(text))
        assert index.predict(keyed(bravo + alpha)).chunks == len(bravo) // CHUNK_BYTES
        assert index.predict(keyed("Charlie " * 64 + bravo + alpha)).chunks == 0

    def test_what_follows_a_difference_does_not_count_however_equal_it_is(self) -> None:
        start, end = "start " * 32, "end " * 32  # 192 bytes and 128: whole chunks
        index = PrefixIndex()
        index.insert(keyed(start + "one " * 16 + end))
        assert index.predict(keyed(start + "two " * 16 + end)).chunks == len(start) // CHUNK_BYTES

    @pytest.mark.parametrize("block_size", [1, 16, 528, 8320])
    def test_a_prompt_takes_as_much_memory_whatever_the_engines_blocks(self, block_size: int) -> None:
        index = PrefixIndex()
        index.set_engine(10**9, block_size)
        index.insert(keyed("word " * 640))
        assert len(index) == 5 * 640 // CHUNK_BYTES

    def test_the_least_recently_used_prompt_goes_first_and_its_tail_before_its_start(self) -> None:
        index = seen("abcd", "xyz", capacity=5)
        assert index.known.matched(request("xyz").chunks) == 3
        assert index.known.matched(request("abcd").chunks) == 2

    def test_no_more_is_remembered_than_the_engine_can_hold(self) -> None:
        index = seen("abcdefgh")
        index.set_engine(5 * 16)
        assert len(index) == 5

    def test_a_new_engine_process_has_nothing(self) -> None:
        index = seen("abc")
        index.clear()
        assert index.predict(request("abc")) == Match(0, 0)


class TestTokens:
    def test_the_last_token_of_a_prompt_is_never_cached(self) -> None:
        assert seen("abcd").predict(request("abcd")) == Match(4, 63)

    def test_what_the_engine_said_of_this_start_is_said_again(self) -> None:
        index = seen("abcdef")
        asked = request("abcxyz", tokens=120)
        match = index.predict(asked)
        index.insert(asked)
        index.learn(asked, match, Used(120, 10, cached_tokens=64))
        assert index.predict(request("abcuvw", tokens=120)) == Match(3, 64)

    def test_what_the_engine_said_counts_more_than_an_estimate_of_the_prompt(self) -> None:
        index = seen("abcdef")
        asked = request("abcxyz", tokens=120)
        index.learn(asked, index.predict(asked), Used(300, 10, cached_tokens=200))
        assert index.predict(request("abcuvw", tokens=120)) == Match(3, 200)

    def test_the_next_turn_finds_the_prompt_and_its_answer(self) -> None:
        index = PrefixIndex()
        first = request("abcd", tokens=70)
        index.insert(first)
        index.learn(first, Match(0, 0), Used(70, 50, cached_tokens=0))
        assert index.predict(request("abcdefgh", tokens=200)) == Match(4, 120)

    def test_an_evicted_prefix_teaches_no_offset_and_shortens_the_memory(self) -> None:
        index = seen("abcdefgh")
        index.set_engine(8 * 16)
        asked = request("abcdefgh", tokens=200)
        for _ in range(10):
            index.insert(asked)
            index.learn(asked, index.predict(asked), Used(200, 1, cached_tokens=0))
        assert index.offset == 0.0
        assert index.capacity < 8

    def test_a_conversation_id_outlives_another_wording_once_it_has_proved_right(self) -> None:
        index = PrefixIndex()
        for turn, (text, cached) in enumerate([("abc", 0), ("abcd", 50), ("Abcde", 70)]):
            asked = request(text, tokens=60 + 20 * turn, conversation="c-1")
            match = index.predict(asked)
            index.insert(asked)
            index.learn(asked, match, Used(60 + 20 * turn, 0, cached_tokens=cached))
        # the third turn was spelled otherwise, and the engine still had the second: so it may have the third
        assert index.predict(request("Xbcdef", tokens=120, conversation="c-1")) == Match(0, 0)
        asked = request("Abcdef", tokens=120, conversation="c-1")
        index.learn(asked, index.predict(asked), Used(120, 0, cached_tokens=96))
        assert index.predict(request("Xbcdefg", tokens=140, conversation="c-1")) == Match(0, 120)

    @pytest.mark.parametrize("seed", range(3))
    def test_with_a_template_the_prediction_comes_within_a_block(self, seed: int) -> None:
        """A template adds 23 tokens in front, and the engine counts whole blocks: both are learned."""
        rng, index, header = random.Random(seed), PrefixIndex(), 23
        systems = ["s" * rng.randrange(6, 40) + chr(97 + number) * 3 for number in range(6)]
        cached: set[str] = set()
        errors = []
        for turn in range(120):
            text = rng.choice(systems) + "".join(chr(0x4E00 + rng.randrange(9000)) for _ in range(rng.randrange(2, 9)))
            prompt = header + 16 * len(text) + 9
            shared = max((end for end in range(len(text) + 1) if text[:end] in cached), default=0)
            # the part of a chunk in which two prompts differ is shared too, up to where they do
            told = 0 if not shared else (header + 16 * shared + rng.randrange(16)) // BLOCK * BLOCK
            asked = request(text, tokens=prompt)
            match = index.predict(asked)
            index.insert(asked)
            index.learn(asked, match, Used(prompt, 8, told))
            cached.update(text[:end] for end in range(1, len(text) + 1))
            if turn >= 40:
                errors.append(abs(match.tokens - told))
        assert sum(error <= BLOCK for error in errors) / len(errors) >= 0.95


def test_prompts_that_share_nothing_take_no_more_memory_than_the_bound() -> None:
    """A chunk each is the worst case: every one is a run of its own."""
    index = PrefixIndex(10_000)
    tracemalloc.start()
    for number in range(40_000):
        index.insert(Waiting("r", "gold", "acme", 0.0, chunks=(number.to_bytes(16),)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 10_000
    assert taken / len(index) < 500, "bytes a chunk: a million take half a gigabyte at the very most"


A_MILLION_PROMPTS = """
import resource
from cacheaware_sidecar.scheduling import Waiting
from cacheaware_sidecar.scheduling.prefix_index import PrefixIndex

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

index, before = PrefixIndex(), resident()
for number in range(1_000_000):
    index.insert(Waiting("r", "gold", "acme", 0.0, chunks=(number.to_bytes(16),)))
print(len(index), resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's own memory in /proc")
def test_a_million_prompts_that_share_nothing_take_a_bounded_part_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", A_MILLION_PROMPTS], capture_output=True, text=True, check=True)
    chunks, taken = map(int, done.stdout.split())
    assert chunks == DEFAULT_CAPACITY
    assert taken < 160 * 1024**2, "of the 2 GiB that the sidecar of a pod may have"
