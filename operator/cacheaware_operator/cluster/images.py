"""Which images a release's pods run."""

from __future__ import annotations

from dataclasses import dataclass

from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType

VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"  # unmodified


@dataclass(frozen=True, slots=True)
class Images:
    engine: str  # the Torch engine; it also fetches models for other engines
    sidecar: str
    vllm: str = VLLM_IMAGE

    def of_engine(self, spec: CacheAwarePoolSpec) -> str:
        """The pool's own image where it names one."""
        if spec.engine.image is not None:
            return spec.engine.image
        return self.vllm if spec.engine.type is EngineType.VLLM else self.engine

    def of_model_fetcher(self, spec: CacheAwarePoolSpec) -> str:
        """An image with `cacheaware_engine.fetch_model`: of a Torch pool, whatever runs its engine."""
        return self.of_engine(spec) if spec.engine.type is EngineType.TORCH else self.engine
