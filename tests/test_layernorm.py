"""LayerNorm beyond what the registry's own inputs can say."""

import numpy as np
import pytest

from kernels.check import Problem, check
from kernels.layernorm.forward import layernorm_forward


@pytest.mark.parametrize("version", layernorm_forward.versions.values(), ids=lambda version: str(version.number))
def test_a_large_mean_does_not_drown_the_variance(version):
    """At a mean of 1000 the difference of mean(x**2) and mean(x)**2, in float32, has no right digit."""
    problem = Problem.of(layernorm_forward, {"N": 3, "C": 768})
    inp = problem.arguments["inp"] = np.random.default_rng(3).standard_normal((3, 768), np.float32) + np.float32(1000)
    problem.truth = {"rstd": 1 / np.sqrt(inp.astype(np.float64).var(axis=1) + 1e-5)}
    assert check(version, problem)["rstd"] <= layernorm_forward.tolerance
