"""`GQSGDConfig`: one frozen value that says what to compress and how. It is checked when it is created."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_gqsgd.codecs import CODECS
from lightning_gqsgd.codecs.base import BiasedCodec
from lightning_gqsgd.codecs.companded.codec import DITHERS as COMPANDED_DITHERS
from lightning_gqsgd.codecs.eden.codec import EdenCodec
from lightning_gqsgd.codecs.exponential.codec import MAX_MANTISSA
from lightning_gqsgd.codecs.floats.codec import REDUCER_OF_BITS
from lightning_gqsgd.codecs.linear.codec import DITHERS
from lightning_gqsgd.config import combinations
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.errors import (
    MAX_INTEGER,
    ConfigError,
    check_integer,
    check_one_of,
    check_real,
    did_you_mean,
    plain_integer,
)
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.spec import memories
from lightning_gqsgd.spec.bits_by_name import BitsByName
from lightning_gqsgd.spec.decisions import ALLOW, WIDTHS, WIDTHS_IN_WORDS, pinned_bits
from lightning_gqsgd.spec.fields import Chosen, Fields

#: How codes are written: with a fixed width, or as Elias omega codes.
CODERS = ("fixed", "elias")
#: Default of ``max_slowdown`` with ``bits="auto"``.
MAX_SLOWDOWN = 0.05
_BIASED_CODECS = tuple(name for name, kind in CODECS.items() if issubclass(kind, BiasedCodec))
#: Fields that all candidates of ``auto`` have in common, also those of 16 and 32 bits.
_ALIKE = ("min_numel", "warmup_steps", "seed", "sample_every", "exclude", "sparse", "sparse_limit", "connections")
#: Remedies for names that are not fields, which users try because other calls have them.
_REMEDIES = {
    **dict.fromkeys(("config", "cfg"), "a GQSGDConfig takes the preset's place: preset=GQSGDConfig(...)"),
    **dict.fromkeys(
        ("local_steps", "every", "elastic"),
        "local steps do without DistributedDataParallel: take LocalSteps(model, optimizer, every=32), or in Lightning "
        "GQSGDStrategy(local_steps=32)",
    ),
    "op": "the result is the mean over ranks; multiply it by their number for the sum",
}


@dataclass(frozen=True, kw_only=True)
class GQSGDConfig(Fields):
    """Configuration of the compression.

    Attributes:
        bits: bits per coordinate of a message, for any number of ranks: 1 to 8 for linear, 2 to 8 for companded and
            exponential, 1 to 4 for eden and trellis. 16: bf16 numbers, rounded at random. 32: the uncompressed gradient
            in its own dtype (the reducer ``"native"``). None: the codec's default, which is 8 for linear, companded and
            exponential, 2 for eden and trellis, 1 for sign, and 32 for top_k and dct_top_k; the field then holds the
            number. With 32, top_k and dct_top_k send the coordinates that they keep uncompressed; with 2 to 4, top_k
            rounds them to this number of bits. With 1, stochastic rounding is not possible. ``"auto"``: the smallest
            number of bits in ``allow`` whose error is small compared with the noise of the gradients, see
            ``max_slowdown``; the field then holds the largest number of bits in ``allow`` that is at most 8. A
            dictionary, e.g. ``{"*": 4, "head.*": 8}``: bits by shell-style patterns of parameter names. The last
            pattern that matches a name decides. This works with DDP and FSDP2 only, and without a memory. All other
            fields apply to every number of bits. The field then holds a `spec.bits_by_name.BitsByName`.
        codec: ``"linear"``, uniform levels with dither (QSGD, arXiv 1610.02132; Global-QSGD, arXiv 2305.18627);
            ``"companded"``, levels that are denser near zero, with subtractive dither: it is unbiased and has a smaller
            error at the same number of bits, but its codes cannot be summed; ``"eden"``, a random rotation followed by
            the best levels for Gaussian numbers (EDEN, arXiv 2108.08842; at 1 bit DRIVE, arXiv 2105.08339), unbiased
            over its random rotations; ``"trellis"``, EDEN with a trellis: the smallest error at 1 to 4 bits;
            ``"exponential"``, powers of two with ``mantissa`` bits in between (natural compression, arXiv 1905.10988);
            ``"sign"``, one bit and the block's mean magnitude; ``"top_k"``, the largest coordinates of each block;
            ``"dct_top_k"``, the largest coefficients of each block's cosine transform (DeMo, arXiv 2411.19870). The
            last three are biased, so they need a memory. ``"float"``: floating-point numbers of 16 or 32 bits, which
            the backend's own all-reduce adds. ``"auto"`` chooses companded, and eden at 2 bits, except in these cases:
            it chooses linear if another field needs a property that only linear codes have (sums of codes, global
            scales, Elias codes, a dither that the receiver does not subtract, ``levels``, or one bit); it chooses
            companded at 2 bits if another field needs something that eden does not support (other scales, ``rotation``,
            subtractive dither in every block, blocks of another size, or sparse rows, which are shorter than eden's
            blocks); and it chooses float for 16 and 32 bits. The field then holds the name of the chosen codec. If
            fields are replaced later, "auto" chooses again.
        levels: number of non-zero magnitudes (s in the papers) of a stochastic linear or an exponential code. None: as
            many as fit.
        mantissa: number of mantissa bits between two powers of two of an exponential code, 0 to 3. With
            ``sparse="logarithmic"``, it is m in the base 2^(1/2^m) of rows.
        density: share of coordinates that top_k and dct_top_k keep, rounded up in each block.
        block_size: number of coordinates of one parameter that share a scale: a multiple of 8 from 16 to 65536, and for
            eden and trellis a power of two of at least 128. 0: the codec's default, which is 128 for companded, 1024
            for trellis, 4096 for dct_top_k and 256 for all others. The field then holds the number; if "auto" later
            chooses another codec, it holds the default of that codec.
        norm: how the scale is computed: ``"max"``, the largest magnitude; ``"l2"``, the l2 norm; ``"power_of_two"``,
            the largest magnitude rounded up to a power of two.
        clip: limits the scale to this many root mean squares. Larger coordinates are clipped (TernGrad, arXiv
            1705.07878), which is a bias. 0: no limit.
        scale: ``"global"`` (all ranks share a scale), ``"local"`` (each rank has its own scale) or ``"auto"`` (the
            choice of the reducer).
        norm_over_ranks: how a shared scale is computed from the ranks' own scales: ``"max"``, the largest; ``"l2"``,
            the root of the sum of squares; ``"l1"``, the sum. Together with ``norm``, this is the norm ‖·‖_{q,p} of
            Global-QSGD (arXiv 2305.18627). For the last two, all ranks send their scales to all ranks. The resulting
            scale is larger, so the error is larger, too.
        scale_per: the coordinates from which the norm is computed: ``"block"``, ``"parameter"``, or ``"bucket"``, which
            means all quantised coordinates that are sent together (a bucket of DDP, a unit of FSDP, a fragment of local
            steps, the tensor of ``all_reduce``; with bits by name, neighbours that have the same bits). With
            ``"bucket"``, results depend on the buckets. If DDP's ``bucket_cap_mb`` is as large as the model, there is
            one scale for the whole model.
        dither: ``"subtractive"`` (the receiver subtracts the dither again: error variance Δ²/12), ``"stochastic"``
            (stochastic rounding: Δ²/6 on average, zeros stay zeros), ``"adaptive"`` (the one with the smaller error in
            each block: stochastic if more than about half of the coordinates are zero, or more than about nine tenths
            with companded codes; with the reducer ``"sum"``, always subtractive; exponential, sign, top_k, eden and
            trellis codecs use their own dither under this name) or ``"nearest"`` (no dither: biased, so it needs a
            memory). Companded codes support "subtractive" and "adaptive".
        rotation: whether to rotate each block by a random Hadamard matrix first, which spreads large coordinates over
            the whole block.
        coder: ``"fixed"`` width, or ``"elias"``: Elias omega codes (QSGD), for the reducer ``"gather"`` on the CPU.
        reducer: ``"sum"``, ``"two_shot"``, ``"gather"``, ``"tree"`` (exponential codes are added in pairs),
            ``"hierarchical"`` (native inside each node; between nodes, the reducer that "auto" chooses for the number
            of nodes), ``"native"`` (no compression), ``"bf16"`` (the reducer of 16 bits), ``"lossless"`` (exact
            gradients with entropy-coded exponents, on the CPU) or ``"auto"``: gather on two ranks and two_shot on more;
            gather on any number for biased codecs; sum, tree or gather for shared scales; with several ranks on each
            node, hierarchical if it is predicted to be faster.
        node_size: number of consecutive ranks on each node, for the reducer ``"hierarchical"``. 0: ranks find it when
            they start, from the names of their hosts and the variables of the launcher.
        memory: memory of the messages that a rank sends: ``"none"``, ``"ef"``, ``"ecq"``, ``"diana"``, ``"ef21"``,
            ``"shared"``, a `Memory`, or a dictionary of its numbers. ``"auto"``: none if the codec is unbiased.
        memory_down: memory of the messages that the owner of a shard sends back, with the reducer ``"two_shot"``.
            ``"auto"``: none, unless ``memory`` is shared, because a shared memory applies to both directions.
        min_numel: parameters with fewer elements are sent uncompressed inside the same messages. With 16 bits, all
            parameters are rounded.
        exclude: shell-style patterns of the names of parameters that are sent uncompressed, e.g. ``("*embedding*",)``.
        warmup_steps: number of steps at the start in which everything is sent uncompressed.
        seed: seed of the counter-based dither; it has to be equal on all ranks.
        sample_every: number of steps from one measurement of the relative error, on a sample of coordinates, to the
            next. 0 switches it off.
        auto: whether to choose ``bits`` from ``allow`` during the training, by the length of steps (see
            `adaptive.trials`). Results then depend on the measured times. Leave ``bits`` out. All other fields apply to
            codes of up to 8 bits. A `spec.decisions.Decision`, or its dictionary, as ``state.decisions`` and
            checkpoints have them, selects the bits of this decision: the field then holds False, and ``bits`` holds the
            number.
        allow: with ``auto`` or ``bits="auto"``, the numbers of bits that may be chosen, at least two.
        max_slowdown: with ``bits="auto"``, the share by which rounding may increase the number of steps of a training,
            above 0. The variance of the rounding of the mean is kept at or below ``max_slowdown`` times the sampling
            variance of the mean (see `adaptive.noise`). None: no limit, or 0.05 with ``bits="auto"``. If it is given
            alone, it implies ``bits="auto"``. With ``auto`` as well, the fastest of the remaining numbers of bits is
            chosen.
        sparse: how the sparse gradients of ``nn.Embedding(sparse=True)`` and ``nn.EmbeddingBag`` are handled:
            ``"refuse"`` raises an error; ``"gather"`` gathers the touched rows of all ranks, in codes of this
            configuration; ``"logarithmic"`` does the same in powers of a base (FastSGD, arXiv 2112.04291), which is
            biased; ``"sketch"`` sums sketches of the rows in the compute dtype (S2 Reducer, arXiv 2110.02140). DDP
            only.
        sparse_limit: if the touched rows of all ranks, added up, are more than ``sparse_limit`` times the rows of the
            table, the table is reduced as a dense gradient in this step. A row that two ranks touch counts twice. 0:
            always dense.
        connections: number of connections between each pair of ranks, for each exchange, 1 to 16. The pieces of a
            bucket use them in turns. Gloo only.

    Raises:
        ConfigError: if a value is out of its range, or if a combination cannot work.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.auto, bool):
            self._check_allow()
            self._pin(pinned_bits(self.auto, self.bits, self.max_slowdown, self.allow))
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, plain_integer(value))
        if hasattr(self.bits, "__array__"):  # a tensor, or a number of NumPy that is not an integer
            raise ConfigError(f"bits={self.bits!r} must be an integer, or 'auto'")
        if isinstance(self.bits, Iterable) and not isinstance(self.bits, str):
            self._check_bits_by_name(BitsByName(self.bits))
            return
        self._check_values()
        self._check_codec()
        combinations.check_reducer(self)
        combinations.check_memories(self)
        combinations.check_sparse(self)
        if self.chooses_bits:
            self.candidates()

    def candidates(self) -> dict[int, GQSGDConfig]:
        """With ``auto`` or ``bits="auto"``, the configurations from which bits are chosen, by their bits, widest first.

        Raises:
            ConfigError: if one of them cannot work.
        """
        if self.max_slowdown is not None:
            self._check_noise()
        fixed: dict[str, Any] = {"auto": False, "allow": ALLOW, "max_slowdown": None}
        return {bits: self._with_bits(bits, **fixed) for bits in self.allow}

    def by_bits(self) -> dict[int, GQSGDConfig]:
        """Returns the configurations of all parameters, by their bits. This is one configuration, unless ``bits`` are
        given by name.

        The first one belongs to the first pattern. Configurations of 16 and 32 bits keep only the fields that do not
        concern codes.
        """
        by_name = self.bits_by_name
        if by_name is None:
            return {self.num_bits: self}
        return {bits: self._with_bits(bits) for bits in by_name.values()}

    @property
    def biased(self) -> bool:
        """True if the mean of the decoded coordinates differs from the encoded ones, so that training needs a memory.
        Clipping is a bias, too, but does not count here, because the user asks for it."""
        return bool(codec_of(self).biased_by)

    def describe(self) -> str:
        """Returns bits and codec in words, e.g. ``8 bits (companded, adaptive dither, blocks of 128)``."""
        if self.bits_by_name is not None:
            widths = {bits: config.describe() for bits, config in self.by_bits().items()}
            patterns = {bits: [p for p, width in self.bits_by_name.items() if width == bits] for bits in widths}
            return "; ".join(f"{', '.join(map(repr, patterns[bits]))}: {widths[bits]}" for bits in widths)
        if self.chooses_bits:
            codes = [config for bits, config in self.candidates().items() if bits not in REDUCER_OF_BITS]
            ways = ["the length of steps"] if self.auto else []
            ways += (
                [] if self.max_slowdown is None else [f"the noise of gradients (max_slowdown {self.max_slowdown:g})"]
            )
            allowed = f"{', '.join(map(str, self.allow[:-1]))} or {self.allow[-1]} bits, by {' and '.join(ways)}"
            return f"{allowed} (codes: {codes[0].describe()})" if codes else allowed
        bits, what = codec_of(self).describe()
        what += ["rotated"] if self.rotation else []
        what += ["Elias codes"] if self.coder == "elias" else []
        what += ["exponents entropy-coded"] if self.reducer == "lossless" else []
        if self.codec != "float":
            per_block = self.scale_per == "block"
            what.append(f"blocks of {self.block_size}" if per_block else f"one scale per {self.scale_per}")
            what += [] if self.norm_over_ranks == "max" else [f"{self.norm_over_ranks} norm over ranks"]
        for way, memory in (("", self.up), (" on the way back", self.down)):
            if memory is not None:
                what.append(f"{'shared ' if memory.shared else ''}memory{way}: {memories.numbers_in_words(memory)}")
        return f"{bits} {'bit' if bits == '1' else 'bits'} ({', '.join(what)})"

    def describe_rows(self, *, raw: bool = False) -> str:
        """Returns the form in which the touched rows of a table with sparse gradients are sent.

        Args:
            raw: whether the table's gradient travels uncompressed, as ``exclude`` and ``min_numel`` say.
        """
        if self.sparse == "sketch":
            return "sums of sketches in the compute dtype, uncompressed"
        if self.reducer == "native" or (raw and self.num_bits != 16):
            return "as they are, in the compute dtype"
        if self.sparse == "logarithmic" and self.codec != "float":
            base = ("two", "2^1/2", "2^1/4", "2^1/8")[self.mantissa]
            return f"{self.num_bits} bits (signs and powers of {base})"
        return self.describe()

    @classmethod
    def check_names(cls, names: Any) -> None:
        """Raise ConfigError for a name that is not a field. The message suggests the nearest field."""
        for name in names:
            if name not in cls.field_names():
                remedy = _REMEDIES.get(name)
                hint = did_you_mean(name, cls.field_names()) if remedy is None else f"; {remedy}"
                raise ConfigError(f"unknown field {name!r}{hint} (fields: {', '.join(cls.field_names())})")

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain values, for checkpoints and messages."""
        bits = self.bits if self.bits_by_name is None else self.bits_by_name.pairs()
        plain: dict[str, Any] = {name: memories.plain(getattr(self, name)) for name in ("memory", "memory_down")}
        plain |= {"codec": str(self.codec), "bits": bits, "exclude": list(self.exclude), "allow": list(self.allow)}
        return {**asdict(self), **plain}

    def replaced(self, **fields: Any) -> GQSGDConfig:
        """Returns the configuration with some fields replaced.

        With 16 or 32 bits, which are no codes, only the fields that do not concern codes are kept.

        Raises:
            ConfigError: if the result cannot work.
        """
        if not isinstance(fields.get("auto", False), bool):  # a decision takes the place of what chose bits
            fields = {"bits": None, "max_slowdown": None, **fields}
        bits = fields.get("bits")
        if isinstance(bits, int) and bits in REDUCER_OF_BITS and bits != self.bits:
            return GQSGDConfig(**{**{name: getattr(self, name) for name in _ALIKE}, **fields})
        return replace(self, **fields)

    def _with_bits(self, bits: int, **fields: Any) -> GQSGDConfig:
        """Returns the configuration with a number of bits and with other fields. With 16 or 32 bits, it has only the
        fields that do not concern codes."""
        if bits in REDUCER_OF_BITS:
            return GQSGDConfig(bits=bits, **{name: getattr(self, name) for name in _ALIKE})
        return replace(self, bits=bits, **fields)

    def _pin(self, bits: int) -> None:
        """Take the bits of a decision: become the candidate with this number of bits."""
        pinned: dict[str, Any] = {"auto": False, "bits": bits, "allow": ALLOW}
        if bits in REDUCER_OF_BITS:
            kept = {*_ALIKE, "memory", "memory_down"}  # memories are refused where they cannot be
            pinned = {field.name: field.default for field in fields(self) if field.name not in kept} | pinned
        for name, value in pinned.items():
            object.__setattr__(self, name, value)

    def _check_bits_by_name(self, bits: BitsByName) -> None:
        """Check ``bits`` by name, and all other fields with each number of bits.

        Each number of bits has its own codec, so ``codec`` may stay "auto".
        """
        object.__setattr__(self, "bits", bits)
        for pattern, width in bits.items():
            if width not in WIDTHS:
                raise ConfigError(f"bits={{{pattern!r}: {width}}} is out of range: {WIDTHS_IN_WORDS}")
        if self.auto or self.max_slowdown is not None:
            name = "auto" if self.auto else "max_slowdown"
            raise ConfigError(
                f"bits={bits!r} with {name}: bits are either given by name or chosen while training; leave one out"
            )
        for config in self.by_bits().values():
            if config.remembers:
                raise ConfigError(
                    f"bits={bits!r} does not work with a memory; leave memory and memory_down out, or give bits as a "
                    "number"
                )
            for name in ("exclude", "allow", "memory", "memory_down"):  # in the spelling of a checked configuration
                object.__setattr__(self, name, getattr(config, name))

    def _check_values(self) -> None:
        """Check each field by itself, and give a field that has several spellings one of them."""
        self._check_auto()
        check_one_of("codec", self.codec, ("auto", *CODECS))
        check_one_of("dither", self.dither, DITHERS)
        check_one_of("coder", self.coder, CODERS)
        check_one_of("reducer", self.reducer, ("auto", *REDUCERS))
        if self.codec == "auto" or isinstance(self.codec, Chosen):
            self._choose_codec()
        if self.chooses_bits:
            self._check_allowed()
        check_integer("block_size", self.block_size, 0, 65536)
        if self.block_size == 0:
            object.__setattr__(self, "block_size", CODECS[self.codec].default_block_size)
        check_integer("mantissa", self.mantissa, 0, MAX_MANTISSA)
        check_integer("block_size", self.block_size, 16, 65536)
        if self.block_size % 8:
            raise ConfigError(f"block_size={self.block_size} is not a multiple of 8; take e.g. 128 or 256")
        for name in ("min_numel", "warmup_steps", "seed", "sample_every"):
            check_integer(name, getattr(self, name), 0, MAX_INTEGER)
        check_integer("node_size", self.node_size, 0, 2**20)
        check_integer("connections", self.connections, 1, 16)
        check_real("density", self.density, 0, 1)
        if self.levels is not None:
            check_integer("levels", self.levels, 1, MAX_INTEGER)
        if not isinstance(self.rotation, bool):
            raise ConfigError(f"rotation={self.rotation!r} must be True or False")
        # A set has another order in each process.
        listed = isinstance(self.exclude, Sequence) and not isinstance(self.exclude, str)
        if not listed or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigError(f"exclude={self.exclude!r} must be a sequence of patterns, e.g. ('*.bias',)")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for name in ("memory", "memory_down"):
            object.__setattr__(self, name, memories.parse(name, getattr(self, name)))
        if self.bits is None:
            object.__setattr__(self, "bits", 16 if self.reducer == "bf16" else CODECS[self.codec].default_bits)
        elif isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise ConfigError(f"bits={self.bits!r} must be an integer, or 'auto'")
        elif self.bits not in WIDTHS:
            raise ConfigError(f"bits={self.bits} is out of range: {WIDTHS_IN_WORDS}, or 'auto'")
        if self.codec == "float" and self.reducer == "auto":
            object.__setattr__(self, "reducer", REDUCER_OF_BITS.get(self.num_bits, "auto"))

    def _check_auto(self) -> None:
        """Check ``auto``, ``allow``, ``max_slowdown``, and give ``bits`` the most bits of a code that are allowed."""
        self._check_max_slowdown()
        self._check_allow()
        allow = self.allow
        if self.chooses_bits:
            self._check_forgetful()
        else:
            if allow != ALLOW:
                raise ConfigError(
                    f'allow={allow} is for auto=True or bits="auto"; leave it out, or give auto=True or bits="auto"'
                )
            return
        name = "auto=True" if self.auto else f"max_slowdown={self.max_slowdown:g}"
        if len(allow) < 2:
            raise ConfigError(f"allow={allow} leaves {name} nothing to choose; allow at least two, e.g. {ALLOW}")
        if self._averages_floats:
            raise ConfigError(f"reducer={self.reducer!r} leaves {name} nothing to choose; leave reducer out")
        bits = max((bits for bits in allow if bits not in REDUCER_OF_BITS), default=allow[-1])
        if self.bits not in (None, "auto", bits):
            field = "auto" if self.auto else "max_slowdown"
            remedy = f"leave bits out, or {field}"
            remedy += f"; or give e.g. allow=(32, {self.bits})" if self.bits in range(1, 9) else ""
            raise ConfigError(f"bits={self.bits} with {name}; allow={allow} says what may be taken: {remedy}")
        object.__setattr__(self, "bits", bits)

    def _check_max_slowdown(self) -> None:
        """Check ``max_slowdown``, and give it its default for ``bits="auto"``."""
        if self.max_slowdown is None:
            if self.bits == "auto":
                object.__setattr__(self, "max_slowdown", MAX_SLOWDOWN)
            return
        is_number = isinstance(self.max_slowdown, (int, float)) and not isinstance(self.max_slowdown, bool)
        if not is_number or not 0 < self.max_slowdown < math.inf:
            raise ConfigError(
                f"max_slowdown={self.max_slowdown!r} must be a finite number above 0, e.g. {MAX_SLOWDOWN}: the "
                "share of further steps that rounding may cost"
            )
        object.__setattr__(self, "max_slowdown", float(self.max_slowdown))

    def _check_forgetful(self) -> None:
        """Check, before all other fields, that there is no memory, because it would not survive a change of bits."""
        remembers = [name for name in ("memory", "memory_down") if getattr(self, name) not in ("auto", "none", None)]
        name, fields = ("auto=True", "auto") if self.max_slowdown is None else ('bits="auto"', "bits and max_slowdown")
        if self.codec in _BIASED_CODECS:
            weighs = "does not work with a memory, and codec={!r} needs one"
            if self.max_slowdown is not None:
                weighs = "compares variances, so it needs an unbiased codec, which codec={!r} is not"
            raise ConfigError(
                f"{name} {weighs.format(self.codec)}; leave codec and memory out, or the preset that has them, or "
                f"leave {fields} out"
            )
        if remembers:
            raise ConfigError(
                f"{name} does not work with a memory; leave {remembers[0]} out, or the preset that has it, or leave "
                f"{fields} out"
            )

    def _check_allowed(self) -> None:
        """Check that the codec has all numbers of bits of ``allow`` that are no floating-point numbers."""
        widths = CODECS[self.codec].widths
        others = [bits for bits in self.allow if bits not in widths and bits not in REDUCER_OF_BITS]
        if others:
            least = min(widths)
            most = max(widths)
            raise ConfigError(
                f"allow={self.allow} asks for bits={' or '.join(map(str, others))}, and codec={self.codec!r} has "
                f"{least} to {most}; allow 32, 16 and {least} to {most}, e.g. allow={(32, most, most // 2)}"
            )

    def _check_noise(self) -> None:
        """Check that the error of the codes can be weighed against the noise of gradients: it has to be a variance."""
        if self.biased:
            raise ConfigError(
                f'bits="auto" compares variances, so it needs rounding without bias, and dither={self.dither!r} has a '
                "bias; leave dither out, or give bits as a number"
            )
        if combinations.adds_codes(self):  # sums are rounded in ways that `adaptive.noise` does not predict
            raise ConfigError(
                f'bits="auto" works with reducers that average decoded codes, not reducer={self.reducer!r}; leave '
                "reducer out, or give bits as a number"
            )

    def _check_allow(self) -> None:
        """Check that ``allow`` has numbers of bits, and put them in order."""
        listed = isinstance(self.allow, Sequence) and not isinstance(self.allow, str)
        if not listed or not all(type(plain_integer(bits)) is int for bits in self.allow):
            raise ConfigError(f"allow={self.allow!r} must be a sequence of numbers of bits, e.g. {ALLOW}")
        object.__setattr__(self, "allow", tuple(sorted(set(map(plain_integer, self.allow)), reverse=True)))

    def _choose_codec(self) -> None:
        """Choose the codec that "auto" stands for, or choose it again after other fields were replaced."""
        before = self.codec
        chosen = Chosen(self._automatic_codec())
        object.__setattr__(self, "codec", chosen)
        if before not in ("auto", chosen) and self.block_size == CODECS[before].default_block_size:
            object.__setattr__(self, "block_size", 0)

    def _automatic_codec(self) -> str:
        """Returns the name of the codec that "auto" stands for."""
        if self.bits in REDUCER_OF_BITS or (self.bits is None and self._averages_floats):
            return "float"
        if self._needs_linear_codes():
            return "linear"
        # At 2 bits its error is two thirds of that of companded codes, in about as much time. From 4 bits on, they are
        # as good, and have no random rotations.
        return "eden" if self.bits == 2 and self._suits_eden() else "companded"

    @property
    def _averages_floats(self) -> bool:
        """True if the reducer averages floating-point numbers instead of codes."""
        return self.reducer != "auto" and bool(REDUCERS[self.reducer].float_bits)

    def _needs_linear_codes(self) -> bool:
        """Returns whether a field asks for what companded codes do not have, and linear ones do."""
        rounds = self.levels is not None or self.dither not in COMPANDED_DITHERS
        return combinations.shares_scales(self) or rounds or self.coder == "elias" or self.bits == 1

    def _suits_eden(self) -> bool:
        """Returns whether no field asks for what EDEN does not have."""
        usual = {"norm": "max", "clip": 0.0, "scale_per": "block", "dither": "adaptive", "sparse": "refuse"}
        if any(getattr(self, name) != value for name, value in usual.items()):
            return False
        try:
            EdenCodec.of(2).check_blocks(self.block_size or EdenCodec.default_block_size, rotation=self.rotation)
        except (ConfigError, TypeError):  # a size that is no number is refused with its name
            return False
        return True

    def _check_codec(self) -> None:
        """Check what belongs to the codec and to its scales, and that nothing of another codec is set."""
        own = CODECS[self.codec].fields | ({"mantissa"} if self.sparse == "logarithmic" else frozenset())
        others = frozenset[str]().union(*(kind.fields for kind in CODECS.values())) - own - {"dither"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in others and value != field.default:
                readers = [codec for codec, kind in CODECS.items() if field.name in kind.fields]
                raise ConfigError(
                    f"{field.name}={value} is for codec={' or '.join(map(repr, readers))}, not {self.codec!r}; "
                    "leave it out"
                )
        # The other codecs have one dither each, and "adaptive", the default, and "stochastic" both stand for it.
        if "dither" not in own and self.dither not in ("adaptive", "stochastic"):
            raise ConfigError(f"dither={self.dither!r} is for codec='linear'; leave it out with codec={self.codec!r}")
        codec = codec_of(self)
        combinations.check_floats(self)
        codec.check_blocks(self.block_size, rotation=self.rotation)
        combinations.check_scales(self, codec)
