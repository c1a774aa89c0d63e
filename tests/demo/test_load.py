"""The demo's load: everything follows from the committed file, and only gold and silver have anything to share."""

from __future__ import annotations

from importlib import resources
from itertools import islice

import pytest
import yaml

from cacheaware.demo.load import Load, flood, history, questions, turns
from cacheaware_sidecar.prefix_key import CHUNK_BYTES
from cacheaware_sidecar.scheduling.groups import CHECKPOINT_CHUNKS

LOAD = Load.committed()


def test_the_committed_load_has_at_least_forty_gold_requests_a_run() -> None:
    assert LOAD.gold.conversations * LOAD.gold.turns >= 40


def test_a_conversation_is_opened_before_its_turns_count() -> None:
    assert len(turns(LOAD, 0, 0)) == LOAD.gold.turns + 1


def test_off_and_on_alternate_so_that_neither_is_always_first() -> None:
    order = [kind for kind in LOAD.runs if kind != "alone"]
    assert sorted(order[:2]) == sorted(order[2:]) == ["off", "on"]
    assert order[:2] != order[2:]


def test_the_same_seed_and_run_give_the_same_prompts_and_another_run_gives_others() -> None:
    assert history(LOAD, 1, 3) == history(LOAD, 1, 3) != history(LOAD, 2, 3)
    assert turns(LOAD, 1, 3) == turns(LOAD, 1, 3) != turns(LOAD, 1, 4)


def test_flood_prompts_share_no_start() -> None:
    prompts = [prompt[0]["content"] for client in range(4) for prompt in islice(flood(LOAD, 0, client), 50)]
    assert len({prompt[:40] for prompt in prompts}) == len(prompts)


def test_a_reader_asks_several_questions_on_one_document_then_takes_another() -> None:
    asked = [messages[0]["content"].split("\n\n")[0] for messages in islice(questions(LOAD, 0, 0), 6)]
    per_document = LOAD.silver.questions
    assert len(set(asked[:per_document])) == 1
    assert asked[per_document] != asked[0]


def test_all_readers_have_the_same_documents_and_questions_of_their_own() -> None:
    first, second = ([messages[0]["content"] for messages in islice(questions(LOAD, 0, n), 6)] for n in (0, 1))
    assert [text.split("\n\n")[0] for text in first] == [text.split("\n\n")[0] for text in second]
    assert not set(first) & set(second)


def test_a_document_is_long_enough_to_be_waited_for() -> None:
    chunks = CHECKPOINT_CHUNKS * CHUNK_BYTES
    assert all(len(next(questions(LOAD, run, 0))[0]["content"].split("\n\n")[0]) > chunks for run in range(5))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"speed": 3}, "speed is unknown", id="unknown"),
        pytest.param({"gold": {}}, r"gold\.answer_tokens is missing", id="missing in a part"),
    ],
)
def test_a_wrong_load_file_is_refused_by_field(change: dict[str, object], named: str) -> None:
    data = yaml.safe_load(resources.files("cacheaware.demo").joinpath("load.yaml").read_text())
    with pytest.raises(ValueError, match=named):
        Load.parse(data | change)
