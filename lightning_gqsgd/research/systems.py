"""The systems of the literature that are more than a configuration: an optimizer, a rule of training or a topology.

Each system has a place in the package and, if it includes a compression, a configuration for it. Systems that are only
a configuration are in `presets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig


@dataclass(frozen=True)
class System:
    """A system of the literature.

    Attributes:
        fields: the fields of its compression's configuration that are not at their defaults.
        paper: the paper of the system.
        what: a short description of the system.
        home: the name to import, and its module.
        needs: its requirements besides averaged gradients.
        sends: the messages of a rank, and their bits per coordinate.
        keeps: the state of a rank, in numbers per coordinate unless it says otherwise.
        guarantees: the guarantees of its theory, and the problems for which they hold.
        where: ``"training"``: in real training; ``"simulation"``: virtual workers in one process.
        left_out: parts of its paper that are not implemented, and why. Empty if nothing essential is missing.
    """

    fields: Mapping[str, Any]
    paper: str
    what: str
    home: str
    needs: str
    sends: str
    keeps: str
    guarantees: str
    where: str = "simulation"
    left_out: str = ""

    @property
    def config(self) -> GQSGDConfig:
        """The configuration of its compression, for any argument ``preset``."""
        from lightning_gqsgd.config import GQSGDConfig  # imports torch

        return GQSGDConfig(**self.fields)


#: Ternary codes both ways, whose scale is at most 1.5 root mean squares. Larger numbers are clipped to this threshold.
#: Smaller numbers are rounded to zero less often than with the largest magnitude as scale, so there is less noise. The
#: paper's rule of the threshold is not public; this rule is ours.
_THRESHOLD = {"bits": 2, "levels": 1, "dither": "stochastic", "clip": 1.5, "reducer": "two_shot"}
_OWN_THRESHOLD = "the paper's rule of the threshold, which is not public; 1.5 root mean squares are in its place"
_XU = "Xu et al. 2022, arXiv 2208.05631"

SYSTEMS: dict[str, System] = {
    "adagrad": System(
        {},
        "Duchi, Hazan, Singer 2011, JMLR 12",
        "steps that fall where gradients were large",
        "torch.optim.Adagrad",
        needs="any preset",
        sends="as the preset",
        keeps="1, the sum of squares",
        guarantees="regret as of the best fixed scaling; convex",
        where="training",
    ),
    "qcmd_adagrad": System(
        _THRESHOLD,
        _XU,
        "Adagrad with an L1 penalty, by composite mirror descent, on clipped ternary gradients",
        "lightning_gqsgd.research.optim.CMDAdagrad",
        needs="the optimizer",
        sends="gradients, both ways, 2 bits",
        keeps="1, the sum of squares",
        guarantees="Adagrad's regret; noise moves zeros away from zero",
        where="training",
        left_out=_OWN_THRESHOLD,
    ),
    "qrda_adagrad": System(
        _THRESHOLD,
        _XU,
        "Adagrad with an L1 penalty, by dual averaging, on clipped ternary gradients",
        "lightning_gqsgd.research.optim.RDAAdagrad",
        needs="the optimizer, and a model that may start at zero",
        sends="gradients, both ways, 2 bits",
        keeps="2, the sums of gradients and of squares",
        guarantees="Adagrad's regret; zeros survive noise",
        where="training",
        left_out=_OWN_THRESHOLD,
    ),
    "dgd_def": System(
        {"bits": 4, "dither": "nearest", "rotation": True, "memory": "ef", "reducer": "gather"},
        "Saha et al. 2021, arXiv 2103.07578",
        "rotated gradients at the nearest level, errors fed back, gradients at the point without errors",
        "lightning_gqsgd.research.simulation.shifted.DGDDEF",
        needs="gradients at a point of each rank's own, and one learning rate",
        sends="gradients, 1 to 8 bits, and fewer in random subspaces",
        keeps="1, the error",
        guarantees="gradient descent's linear rate from 2 bits on (1 with codec sign); smooth, strongly convex",
        left_out="training between processes, because DDP has one model for all workers and so no point of each rank's "
        "own",
    ),
    "fedvote": System(
        {"bits": 4, "dither": "nearest", "memory": "none", "reducer": "sum", "block_size": 65536},
        "Yue et al. 2021, arXiv 2110.02998",
        "workers train by themselves and vote on each weight's sign; votes are summed as integers",
        "lightning_gqsgd.research.simulation.votes.FedVote",
        needs="local steps, and weights W = tanh(k h) of latent numbers h",
        sends="votes once per round, log2(n + 1) bits; with reputations 1 bit to each other rank",
        keeps="1, the latent number; with reputations n numbers in all",
        guarantees="votes are unbiased given h, and their sum is exact; reputations outvote a minority of attackers",
    ),
    "dpsvrg": System(
        {"reducer": "native"},
        "Li et al. 2021, arXiv 2112.10389",
        "variance-reduced proximal gradients, models exchanged with neighbours in a graph",
        "lightning_gqsgd.research.simulation.gossip.DPSVRG",
        needs="a graph, full gradients now and then, two gradients per batch",
        sends="models to each neighbour, several times per step, 32 bits",
        keeps="2, the snapshot and its gradient",
        guarantees="error O(1/T) against O(1/√T) of DSPG; convex with a proximal penalty",
        left_out="training between processes, because ranks would hold different models",
    ),
    "fastsgd": System(
        {"bits": 5, "sparse": "logarithmic"},
        "Yang et al. 2021, arXiv 2112.04291",
        "touched rows of tables as signs and powers of two, with packed row numbers",
        "lightning_gqsgd.register_gqsgd",
        needs="embeddings with sparse=True, on the CPU",
        sends="touched rows to each other rank, 2 to 8 bits, and 8 to 12 bits per row",
        keeps="none",
        guarantees="kept coordinates are off by a factor of at most √b with the base b = 2, √2, 2^¼ or 2^⅛; biased",
        where="training",
        left_out="dense gradients, for which codec='exponential' is unbiased, and GPUs, where the host would have to "
        "wait for lengths",
    ),
    "s2_reducer": System(
        {"sparse": "sketch"},
        "Ge et al. 2022, arXiv 2110.02140",
        "touched rows of tables as a sum of sketches, read by peeling",
        "lightning_gqsgd.register_gqsgd",
        needs="embeddings with sparse=True, on the CPU",
        sends="sketches, 1.6 times the rows that any rank touches, 32 bits; 1 bit per row to each other rank",
        keeps="none",
        guarantees="the mean to rounding in all but 8 of 10,000 tables and steps, and there an unbiased estimate",
        where="training",
        left_out="the bitmap and non-zero coordinates of dense tensors, because dense gradients of training are not "
        "sparse, and the median, because peeling reads rows exactly from as many cells",
    ),
    "demo": System(
        {
            "codec": "dct_top_k",
            "density": 1 / 128,
            "reducer": "gather",
            "memory": {"alpha": 0.999, "beta": 0.999, "rho": 0},
        },
        "Peng, Quesnelle, Kingma 2024, arXiv 2411.19870",
        "the largest coordinates of the momentum's cosine transform; what is not sent stays in the momentum",
        "lightning_gqsgd.register_gqsgd",
        needs="an optimizer of signs: torch.optim.AdamW(parameters, betas=(0.0, 0.0), eps=1e-12)",
        sends="1/128 of the momentum's transform to each other rank, 48 bits each",
        keeps="1, the momentum",
        guarantees="nothing is lost, only late; no rate is proven",
        where="training",
    ),
    "lossless": System(
        {"bits": 32, "reducer": "lossless"},
        "Lin et al. 2026, arXiv 2604.27844 (ZipCCL)",
        "gradients as they are, whose exponents travel in Huffman codes",
        "lightning_gqsgd.register_gqsgd",
        needs="gradients on the CPU",
        sends="gradients, both ways, about 11 bits in bf16 and 27 in fp32",
        keeps="none",
        guarantees="the mean of whole gradients, added in fp64 and rounded once",
        where="training",
    ),
    "pulse": System(
        {"reducer": "native"},
        "Miahi, Belilovsky 2026, arXiv 2602.03839",
        "weights that others follow, of which only those with other bits in bf16 are sent",
        "lightning_gqsgd.research.patches.Sender",
        needs="receivers that hold bf16 weights, and small learning rates",
        sends="weights whose bits changed, about 20 bits each with their places",
        keeps="0.5, the bf16 weights that were sent",
        guarantees="the bits of all weights, by SHA-256 at both ends",
        where="training",
    ),
    "dion": System(
        {"bits": 32},
        "Ahn et al. 2025, arXiv 2504.05295",
        "orthonormal steps of low rank, of which ranks average the factors",
        "lightning_gqsgd.research.optim.Dion",
        needs="matrices, a model outside of DistributedDataParallel, and the optimizer",
        sends="(m + n) r numbers of a matrix of m n, both ways, 32 bits or fewer; gradients of all others",
        keeps="1, the momentum, and n r of each matrix",
        guarantees="the step of the mean gradient, up to rounding",
        where="training",
    ),
    "qsdp": System(
        {"bits": 8},
        "Markov, Vladu, Guo, Alistarh 2023, arXiv 2302.02390",
        "sharded weights, gathered at few bits, and gradients, reduce-scattered at few bits",
        "lightning_gqsgd.register_gqsgd_fsdp",
        needs="FSDP2 of torch 2.9 or later, reduce_scatter=True and all_gather_bits=8",
        sends="weights to each other rank, twice in a step, and gradients to owners, 2 to 8 bits",
        keeps="none",
        guarantees="rounded weights are unbiased, and the same on all ranks and in both passes of a step",
        where="training",
        left_out="levels that are learnt from the weights, because scales of short blocks follow them",
    ),
}
