"""autopar: a declarative auto-parallel compiler for PyTorch.

`autopar.compile(model, cluster)` plans and generates a distributed training program; `autopar.verify` checks it against
the single-process model; `python -m autopar --help` is the command line.
"""

import gc

from autopar.shadowing import check_shadowing

check_shadowing()
_collects = gc.isenabled()
gc.disable()  # modules are no garbage: collecting while they load is a fifth of the time of an import
try:
    from autopar.certify import Certificate, certify_program  # noqa: E402
    from autopar.cluster import ClusterSpec  # noqa: E402
    from autopar.compile import compile  # noqa: E402, A004
    from autopar.compiled import CompiledProgram  # noqa: E402
    from autopar.errors import AutoparError  # noqa: E402
    from autopar.explain import Explanation, compare, explain  # noqa: E402
    from autopar.plan import Plan  # noqa: E402
    from autopar.proofs import prove_rule  # noqa: E402
    from autopar.rules import register_rule  # noqa: E402
    from autopar.strategies import Predictor, predict  # noqa: E402
    from autopar.trainer import Trainer  # noqa: E402
    from autopar.training.callbacks import Callback, TrainState  # noqa: E402
    from autopar.training.config import TrainerConfig  # noqa: E402
    from autopar.training.result import TrainResult  # noqa: E402
    from autopar.trial import TrialResult, trial  # noqa: E402
    from autopar.trial_report import TrialReport  # noqa: E402
    from autopar.verify import verify  # noqa: E402
    from autopar.verify_report import VerifyReport  # noqa: E402
    from codegen.runtime.processes import Ending  # noqa: E402
finally:
    if _collects:
        if not gc.get_freeze_count():  # move all objects to the oldest generation without examining them
            gc.freeze()
            gc.unfreeze()
        gc.enable()
CompiledProgram.certify = certify_program

__all__ = [
    "AutoparError",
    "Callback",
    "Certificate",
    "ClusterSpec",
    "CompiledProgram",
    "Ending",
    "Explanation",
    "Plan",
    "Predictor",
    "TrainResult",
    "TrainState",
    "Trainer",
    "TrainerConfig",
    "TrialReport",
    "TrialResult",
    "VerifyReport",
    "compare",
    "compile",
    "explain",
    "predict",
    "prove_rule",
    "register_rule",
    "trial",
    "verify",
]

__version__ = "0.1.0"
