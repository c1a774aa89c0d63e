"""Metrics pages of every generation of vLLM are one struct; what a page does not say is not known, and never 0."""

import pytest

from cacheaware_sidecar.engine_metrics import EngineFigures, read_figures

FIRST = """
# HELP vllm:cache_config_info information of cache_config
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_cpu_blocks="2048",num_gpu_blocks="1001"} 1.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="m"} 3.0
"""
EARLY_V1 = """
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cpu_offload_gb="0",num_cpu_blocks="None",num_gpu_blocks="1001"} 1.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:gpu_prefix_cache_hits_total counter
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 12.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""
RENAMED = """
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1001",num_gpu_blocks_override="None"} 1.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""
IN_TOKENS = """
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="16016",num_gpu_blocks="5000"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m",pod="p"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m",pod="p"} 3.0
"""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(FIRST, id="first names, one model"),
        pytest.param(EARLY_V1, id="labels that are None, another engine"),
        pytest.param(RENAMED, id="both names of usage: the newer counts"),
        pytest.param(IN_TOKENS, id="size in tokens: it counts, whatever the blocks"),
    ],
)
def test_every_generation_says_the_same(page: str) -> None:
    figures = read_figures(page)
    assert figures == EngineFigures(block_size=16, blocks=1000, usage=0.25, preemptions=3.0)
    assert figures.held == 250


@pytest.mark.parametrize(
    ("page", "known"),
    [
        pytest.param("", EngineFigures(), id="an empty page"),
        pytest.param("<html>no metrics {", EngineFigures(), id="another kind of page"),
        pytest.param('vllm:cache_config_info{block_size="16"} 1.0\n', EngineFigures(block_size=16), id="no blocks"),
        pytest.param(
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n',
            EngineFigures(block_size=16),
            id="blocks that are not set yet",
        ),
        pytest.param(
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0\n',
            EngineFigures(block_size=16),
            id="no cache at all",
        ),
        pytest.param(
            'vllm:cache_config_info{block_size="-16",num_gpu_blocks="٣"} 1.0\n', EngineFigures(), id="wild numbers"
        ),
        pytest.param("vllm:kv_cache_usage_perc 1.5\n", EngineFigures(), id="more than all"),
        pytest.param("vllm:kv_cache_usage_perc NaN\n", EngineFigures(), id="no number"),
    ],
)
def test_what_a_page_does_not_say_is_not_known(page: str, known: EngineFigures) -> None:
    assert read_figures(page) == known


def test_what_is_held_needs_both_numbers() -> None:
    assert EngineFigures(usage=0.5).held is None
    assert EngineFigures(blocks=10, usage=0.01).held == 1
