"""cleanlab as a user would run it: out-of-sample probabilities, find issues, prune, train again."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from problems import Problem
from sklearn.model_selection import StratifiedKFold

from fastgnl import with_transition
from fastgnl.errors import InputError
from fastgnl.evaluate import predict_proba
from fastgnl.loader import Loader
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.samples import Samples
from fastgnl.tally import Epoch
from fastgnl.trainer import train

FOLDS = 5


def _trained(problem: Problem, samples: Samples, test: Samples | None, seed: int) -> tuple[Any, list[Epoch]]:
    torch.manual_seed(seed)
    backbone: Any = problem.backbone()
    net = with_transition(backbone, backbone.num_features, problem.num_classes, transition_input="none")
    return net, train(net, CrossEntropy(), Loader(samples, problem.batch, seed), problem.config, test)


def pruned_by_cleanlab(problem: Problem, seed: int) -> tuple[list[Epoch], NDArray[np.float64]]:
    """What was reached after pruning, and how doubtful each label is (1 - cleanlab's quality score)."""
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores
    except ImportError as error:
        raise InputError(
            "cleanlab is not installed, wanted it for the method cleanlab (pip install cleanlab)"
        ) from error
    whole: Any = problem.train
    labels = whole.labels.numpy()
    q_NC = np.zeros((len(labels), problem.num_classes))

    def part(rows: NDArray[np.int64]) -> Samples:
        index = torch.from_numpy(rows)
        extra = {"seed": whole.seed} if hasattr(whole, "seed") else {}
        return type(whole)(whole.x[index], whole.labels[index], None, **extra)

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    for inside, outside in folds.split(labels, labels):
        net, _ = _trained(problem, part(inside), None, seed)
        q_NC[outside] = predict_proba(net, part(outside)).numpy()
    q_NC = q_NC.clip(1e-12)
    q_NC /= q_NC.sum(1, keepdims=True)
    issues = find_label_issues(labels, q_NC, n_jobs=1)
    _, history = _trained(problem, part(np.flatnonzero(~issues)), problem.test, seed)  # type: ignore[arg-type]
    return history, 1 - np.asarray(get_label_quality_scores(labels, q_NC))
