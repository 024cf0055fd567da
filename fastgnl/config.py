"""``GNLOptions``: every option of the method. ``GNLConfig``: those of one data set."""

from dataclasses import dataclass
from typing import Literal, get_args

from fastgnl.errors import check, check_choice, check_count, check_range, check_seed
from fastgnl.kernels.backends import Backend
from fastgnl.kernels.candidates import Coverage, PriorForm
from fastgnl.kernels.terms import Direction, EStep, PriorKL

Denominator = Literal["auto", "batch", "window", "bank", "dataset"]
WarmupSets = Literal["auto", "drawn", "given"]
Uncertainty = Literal["mixture", "random", "none"]
LossSource = Literal["online", "eval"]
TableDtype = Literal["float32", "float16", "bfloat16"]
TERMS = ("ce", "prior", "estep")
MANY = 100
"""Classes beyond which "auto" leaves the paper's rules: docs/large-label-sets.md has the table it was chosen by."""


@dataclass(frozen=True, kw_only=True)
class GNLOptions:
    """Every option of the method, checked when made."""

    direction: Direction = "y->x"
    """Which way data are generated, y->x or x->y; changes the E-step only."""
    denominator: Denominator = "auto"
    """Where D_j comes from: the global batch ("auto"), or it and a window of batches, a bank of a momentum encoder's
    rows, or the whole data set."""
    window: int = 4
    """Batches in the sum with denominator="window", the live one included."""
    bank: int = 4096
    """Rows in the bank with denominator="bank", over all ranks; it is not used before it is full."""
    momentum: float = 0.99
    """Of the momentum encoder."""
    mix: float | Literal["auto"] | None = "auto"
    """With "bank" and "dataset", the rows that an average class counts for besides those of the live batch:
    D_j = live_j + mix * rest_j / mean(rest). None is the plain sum live_j + rest_j, "auto" is it up to 100 classes and
    0.25 beyond."""
    prior_kl: PriorKL = "reverse"
    """KL(r || q), KL(q || r), or the cross-entropy of p."""
    estep: EStep = "normalised"
    """The E-step's target normalised, or as the paper prints it."""
    terms: tuple[str, ...] = TERMS
    """Which of ce, prior, estep make up the loss."""
    beta: float = 0.9
    """Decay of the moving average M; 0 keeps the last q only."""
    tau: float = 0.5
    """Temperature of the coverage draw: c ~ M^(1/tau)."""
    k_max: int | Literal["auto"] | None = "auto"
    """Cap on the random candidates: None is the paper's rule, "auto" is it up to 100 classes and 10 beyond."""
    warmup_epochs: int = 10
    """Epochs before w is estimated."""
    warmup_sets: WarmupSets = "auto"
    """Candidate sets before that: with a coverage label and random ones ("auto" up to 100 classes), or the given label
    alone ("auto" beyond)."""
    coverage: Coverage = "sample"
    """The coverage label: drawn from M, its argmax, or left out."""
    uncertainty: Uncertainty = "mixture"
    """w from the losses, at random, or no random candidates at all."""
    prior_form: PriorForm = "set"
    """p uniform on the set, or the paper's sum in which a label named twice weighs double."""
    loss_source: LossSource = "online"
    """w from the losses seen while training, or from those given to end_epoch."""
    table_dtype: TableDtype = "float32"
    """How M is stored. A step rounds to the nearest: the average stops moving once within 4% (bfloat16) or 0.5%
    (float16) of where it is going."""
    top_k: int | None = None
    """Keep only the so many largest entries of each row of M, as float16, the rest spread evenly: for N x C that does
    not fit."""
    backend: Backend = "auto"
    """What computes a step: Triton on a GPU, native code on a CPU, plain PyTorch; "auto" takes the fastest there is."""

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, get_args(Direction))
        check_choice("denominator", self.denominator, get_args(Denominator))
        check_count("window", self.window, 1)
        check_count("bank", self.bank, 1)
        check_range("momentum", self.momentum, 0, 1)
        if self.mix not in ("auto", None):
            check_range("mix", self.mix, 0, 1e9)  # type: ignore[arg-type]
            check(
                self.denominator in ("bank", "dataset"),
                f"mix is {self.mix} with denominator={self.denominator!r}, wanted denominator='bank' or 'dataset'",
            )
        check_choice("prior_kl", self.prior_kl, get_args(PriorKL))
        check_choice("estep", self.estep, get_args(EStep))
        check(len(self.terms) > 0, f"terms is empty, wanted at least one of {', '.join(TERMS)}")
        for term in self.terms:
            check_choice("terms", term, TERMS)
        check_range("beta", self.beta, 0, 1)
        # 1/tau beyond 8 would underflow float32 at 21,841 classes.
        check_range("tau", self.tau, 0.125, 100)
        if self.k_max not in ("auto", None):
            check_count("k_max", self.k_max, 0)  # type: ignore[arg-type]
        check_count("warmup_epochs", self.warmup_epochs, 0)
        check_choice("warmup_sets", self.warmup_sets, get_args(WarmupSets))
        check_choice("coverage", self.coverage, get_args(Coverage))
        check_choice("uncertainty", self.uncertainty, get_args(Uncertainty))
        check_choice("prior_form", self.prior_form, get_args(PriorForm))
        check_choice("loss_source", self.loss_source, get_args(LossSource))
        check_choice("table_dtype", self.table_dtype, get_args(TableDtype))
        if self.top_k is not None:
            check_count("top_k", self.top_k, 1)
        check_choice("backend", self.backend, get_args(Backend))


@dataclass(frozen=True, kw_only=True)
class GNLConfig(GNLOptions):
    """The options for one data set, checked when made. What is "auto" is settled then, by the number of classes."""

    num_samples: int
    """N: sample ids are 0 to N - 1."""
    num_classes: int
    """C."""
    seed: int = 0
    """Key of every random draw."""

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples, 1)
        check_count("num_classes", self.num_classes, 2)
        super().__post_init__()
        check(
            self.top_k is None or self.top_k < self.num_classes,
            f"top_k is {self.top_k} of {self.num_classes} classes, wanted fewer than there are",
        )
        check_seed(self.seed)
        self._settle()

    def _settle(self) -> None:
        """Put in what "auto" stands for."""
        many = self.num_classes > MANY
        large = self.denominator in ("bank", "dataset")
        for name, value in (
            ("denominator", "batch"),
            ("mix", 0.25 if many and large else None),
            ("k_max", 10 if many else None),
            ("warmup_sets", "given" if many else "drawn"),
        ):
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)

    @property
    def candidate_cap(self) -> int | None:
        """k_max, settled."""
        assert self.k_max != "auto"
        return self.k_max

    @property
    def rest_rows(self) -> float | None:
        """mix, settled."""
        assert self.mix != "auto"
        return self.mix
