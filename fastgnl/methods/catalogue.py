"""Every method by name: where it comes from, how many networks it trains, how it is made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fastgnl.errors import check_choice
from fastgnl.methods.base import Setting
from fastgnl.methods.causalnl import CausalNL
from fastgnl.methods.cores import Cores
from fastgnl.methods.coteaching import CoTeaching, JoCoR
from fastgnl.methods.cross_entropy import CrossEntropy
from fastgnl.methods.dividemix import DivideMix
from fastgnl.methods.elr import ELR
from fastgnl.methods.forward import Forward
from fastgnl.methods.gce import GCE
from fastgnl.methods.generative import GenerativePair
from fastgnl.methods.instancegm import InstanceGM
from fastgnl.methods.mixup import Mixup
from fastgnl.methods.peer import PeerLoss
from fastgnl.methods.smoothing import LabelSmoothing, NegativeLabelSmoothing
from fastgnl.methods.volminnet import VolMinNet, VolumeNet
from fastgnl.objective import GNLObjective
from fastgnl.pair import GNLPair
from fastgnl.transition import with_transition

Made = tuple[Any, Any]
"""A network and its objective, as ``fastgnl.trainer.train`` takes them."""


class Entry(NamedTuple):
    title: str
    source: str
    """The paper."""
    networks: int
    make: Callable[[list[Any], Setting], Made]
    """Of as many backbones as there are networks."""


def _nets(backbones: list[Any], setting: Setting, head: bool = False) -> Any:
    parts = backbones[0] if len(backbones) == 1 else (backbones[0], backbones[1])
    return with_transition(
        parts,
        backbones[0].num_features,
        setting.num_classes,
        transition_input="logits" if head else "none",
        seed=setting.seed,
    )


def _gnl(objective: Any, **options: Any) -> Callable[[list[Any], Setting], Made]:
    def make(backbones: list[Any], setting: Setting) -> Made:
        return _nets(backbones, setting, head=True), objective(
            setting.num_samples,
            setting.num_classes,
            ids=setting.own_ids,
            warmup_epochs=setting.warmup_epochs,
            seed=setting.seed,
            **options,
        )

    return make


def _plain(method: Any) -> Callable[[list[Any], Setting], Made]:
    return lambda backbones, setting: (_nets(backbones, setting), method(setting))


def _volmin(backbones: list[Any], setting: Setting) -> Made:
    net = VolumeNet(backbones[0], backbones[0].num_features, setting.num_classes)
    return net, VolMinNet(setting, net)


def _generative(method: Any) -> Callable[[list[Any], Setting], Made]:
    return lambda backbones, setting: (GenerativePair(backbones, setting), method(setting))


METHODS: dict[str, Entry] = {
    "ce": Entry("cross-entropy", "-", 1, _plain(CrossEntropy)),
    "gnl": Entry("GNL, y->x", "Liu et al., GNL", 1, _gnl(GNLObjective, direction="y->x")),
    "gnl-xy": Entry("GNL, x->y", "Liu et al., GNL", 1, _gnl(GNLObjective, direction="x->y")),
    "mixup": Entry("Mixup", "Zhang et al., ICLR 2018", 1, _plain(Mixup)),
    "ls": Entry("label smoothing", "Lukasik et al., ICML 2020", 1, _plain(LabelSmoothing)),
    "nls": Entry("negative label smoothing", "Wei et al., ICML 2022", 1, _plain(NegativeLabelSmoothing)),
    "gce": Entry("GCE", "Zhang and Sabuncu, NeurIPS 2018", 1, _plain(GCE)),
    "forward": Entry("Forward", "Patrini et al., CVPR 2017", 1, _plain(Forward)),
    "peer": Entry("Peer loss", "Liu and Guo, ICML 2020", 1, _plain(PeerLoss)),
    "cores": Entry("CORES2", "Cheng et al., ICLR 2021", 1, _plain(Cores)),
    "elr": Entry("ELR", "Liu et al., NeurIPS 2020", 1, _plain(ELR)),
    "volminnet": Entry("VolMinNet", "Li et al., ICML 2021", 1, _volmin),
    "coteaching": Entry("Co-teaching", "Han et al., NeurIPS 2018", 2, _plain(CoTeaching)),
    "jocor": Entry("JoCoR", "Wei et al., CVPR 2020", 2, _plain(JoCoR)),
    "gnl-pair": Entry("GNL, two networks", "Liu et al., GNL", 2, _gnl(GNLPair, direction="y->x")),
    "causalnl": Entry("CausalNL", "Yao et al., NeurIPS 2021", 2, _generative(CausalNL)),
    "dividemix": Entry("DivideMix", "Li et al., ICLR 2020", 2, _plain(DivideMix)),
    "instancegm": Entry("InstanceGM", "Garg et al., WACV 2023", 2, _generative(InstanceGM)),
}


def make_method(name: str, backbone: Callable[[], nn.Module], setting: Setting) -> Made:
    """The network, at weights that the setting's seed fixes, and the objective of a method."""
    check_choice("method", name, METHODS)
    torch.manual_seed(setting.seed)
    entry = METHODS[name]
    setting = replace(setting, ids=setting.own_ids)
    return entry.make([backbone() for _ in range(entry.networks)], setting)
