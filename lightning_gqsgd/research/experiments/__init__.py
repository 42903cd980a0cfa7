"""The smallest experiment of each system of the literature: rows of claim and measurement, for ``gqsgd systems
check``. Each takes seconds in one process; pages and slow tests have larger ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS
from lightning_gqsgd.research.experiments import codecs, convex, local, optimizing, recent, tables, voting
from lightning_gqsgd.research.experiments.rows import Row
from lightning_gqsgd.research.systems import SYSTEMS

__all__ = ["EXPERIMENTS", "Row", "source_of"]

#: The experiments, by the names that ``gqsgd presets`` has. ``gqsgd_auto`` has none: it chooses by the time of steps.
EXPERIMENTS: dict[str, Callable[[], Iterator[Row]]] = {
    **{
        name: partial(codecs.own, name) for name in ("gqsgd", "gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit", "gqsgd_trellis")
    },
    "gqsgd_sum": codecs.sums,
    "gqsgd_exponential": codecs.exact_exponential,
    **{name: partial(codecs.tree, name) for name in ("gqsgd_exponential_tree", "global_qsgd_exponential")},
    "global_qsgd_linear": codecs.linear,
    "qsgd": codecs.qsgd,
    "qsgd_elias": codecs.qsgd_elias,
    "terngrad": convex.terngrad,
    "natural_compression": codecs.natural_compression,
    "natural_dithering": codecs.natural_dithering,
    "ecq_sgd": convex.ecq_sgd,
    "cd_adam": convex.cd_adam,
    "comp_ams": convex.comp_ams,
    "diana": convex.diana,
    **{name: partial(convex.differences, name) for name in ("artemis", "dore")},
    "wyner_ziv": convex.wyner_ziv,
    "dq_psgd": convex.dq_psgd,
    **{name: partial(codecs.eden, name) for name in ("drive", "eden")},
    **{name: partial(convex.fed_back, name) for name in ("signsgd_ef", "topk_ef")},
    "gqsgd_diloco": local.diloco,
    "gqsgd_fedpaq": local.fedpaq,
    "gqsgd_genqsgd": local.genqsgd,
    "gqsgd_sparseloco": local.sparseloco,
    "gqsgd_chb": local.chb,
    "gqsgd_neolithic": local.neolithic,
    "gqsgd_mcm": local.mcm,
    "gqsgd_predictive": local.predictive,
    "adagrad": optimizing.adagrad,
    **{name: partial(optimizing.penalised, name) for name in ("qcmd_adagrad", "qrda_adagrad")},
    "dgd_def": optimizing.dgd_def,
    "fedvote": voting.fedvote,
    "dpsvrg": voting.dpsvrg,
    "fastsgd": tables.fastsgd,
    "s2_reducer": tables.s2_reducer,
    "demo": recent.demo,
    "lossless": recent.lossless,
    "pulse": recent.pulse,
    "dion": recent.dion,
    "qsdp": recent.qsdp,
    "gqsgd_muloco": recent.muloco,
}


def source_of(name: str) -> str:
    """Returns the paper of a system."""
    for table in (PRESETS, LOCAL_PRESETS, SYSTEMS):
        if name in table:
            return table[name].paper
    raise KeyError(name)
