"""Backbones against the published networks: sizes, names of weights, shapes; weights from files."""

import copy
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastgnl.backbones import BACKBONES, make_backbone, min_side
from fastgnl.backbones.inception_resnet_v2 import block8, block17, block35
from fastgnl.backbones.weights import load_weights
from fastgnl.distributed import synchronise_batch_norm
from fastgnl.errors import InputError
from fastgnl.networks import FastCNN

IMAGES = [name for name in BACKBONES if name != "mlp"]
SMALL = ["small-cnn", "resnet34-cifar", "preact-resnet18"]


# The names and shapes of the published state dicts, classifier included, written down apart from the modules.


def conv(name, inputs, outputs, height, width=None):
    return {f"{name}.weight": (outputs, inputs, height, width or height)}


def norm(name, channels):
    names = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{part}": (channels,) for part in names} | {f"{name}.num_batches_tracked": ()}


def linear(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def resnet(stem, sizes, grows, classes):
    """``sizes``: the convolutions of a block; its outputs are ``grows`` times its width."""
    names = conv("conv1", 3, 64, stem) | norm("bn1", 64)
    inputs = 64
    for layer, (width, blocks) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True), 1):
        for block in range(blocks):
            at, channels = f"layer{layer}.{block}", inputs
            for i, size in enumerate(sizes, 1):
                outputs = width * (grows if i == len(sizes) else 1)
                names |= conv(f"{at}.conv{i}", channels, outputs, size) | norm(f"{at}.bn{i}", outputs)
                channels = outputs
            if block == 0 and inputs != channels:
                names |= conv(f"{at}.downsample.0", inputs, channels, 1) | norm(f"{at}.downsample.1", channels)
            inputs = channels
    return names | linear("fc", inputs, classes)


def preact():
    names = conv("conv1", 3, 64, 3)
    for layer, (inputs, width) in enumerate(((64, 64), (64, 128), (128, 256), (256, 512)), 1):
        for block, channels in enumerate((inputs, width)):
            at = f"layer{layer}.{block}"
            names |= norm(f"{at}.bn1", channels) | conv(f"{at}.conv1", channels, width, 3)
            names |= norm(f"{at}.bn2", width) | conv(f"{at}.conv2", width, width, 3)
        if layer > 1:
            names |= conv(f"layer{layer}.0.shortcut.0", inputs, width, 1)
    return names | linear("linear", 512, 10)


def vgg():
    names, inputs = {}, 3
    numbers = (0, 3, 7, 10, 14, 17, 20, 23, 27, 30, 33, 36, 40, 43, 46, 49)
    for number, width in zip(numbers, [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8, strict=True):
        names |= conv(f"features.{number}", inputs, width, 3) | norm(f"features.{number + 1}", width)
        names |= {f"features.{number}.bias": (width,)}
        inputs = width
    fully = linear("classifier.0", 25088, 4096) | linear("classifier.3", 4096, 4096)
    return names | fully | linear("classifier.6", 4096, 1000)


# name: inputs outputs height width
INCEPTION = """
conv2d_1a 3 32 3 3|conv2d_2a 32 32 3 3|conv2d_2b 32 64 3 3|conv2d_3b 64 80 1 1|conv2d_4a 80 192 3 3
mixed_5b.branch0 192 96 1 1|mixed_5b.branch1.0 192 48 1 1|mixed_5b.branch1.1 48 64 5 5|mixed_5b.branch2.0 192 64 1 1
mixed_5b.branch2.1 64 96 3 3|mixed_5b.branch2.2 96 96 3 3|mixed_5b.branch3.1 192 64 1 1
mixed_6a.branch0 320 384 3 3|mixed_6a.branch1.0 320 256 1 1|mixed_6a.branch1.1 256 256 3 3
mixed_6a.branch1.2 256 384 3 3|mixed_7a.branch0.0 1088 256 1 1|mixed_7a.branch0.1 256 384 3 3
mixed_7a.branch1.0 1088 256 1 1|mixed_7a.branch1.1 256 288 3 3|mixed_7a.branch2.0 1088 256 1 1
mixed_7a.branch2.1 256 288 3 3|mixed_7a.branch2.2 288 320 3 3|conv2d_7b 2080 1536 1 1
"""
REPEATED = {
    "repeat 10 128 320": "branch0 320 32 1 1|branch1.0 320 32 1 1|branch1.1 32 32 3 3|branch2.0 320 32 1 1|"
    "branch2.1 32 48 3 3|branch2.2 48 64 3 3",
    "repeat_1 20 384 1088": "branch0 1088 192 1 1|branch1.0 1088 128 1 1|branch1.1 128 160 1 7|branch1.2 160 192 7 1",
    "repeat_2 9 448 2080": "branch0 2080 192 1 1|branch1.0 2080 192 1 1|branch1.1 192 224 1 3|branch1.2 224 256 3 1",
}


def inception():
    def rows(text, at=""):
        names = {}
        for row in text.strip().replace("\n", "|").split("|"):
            name, *sizes = row.split()
            inputs, outputs, height, width = map(int, sizes)
            names |= conv(f"{at}{name}.conv", inputs, outputs, height, width) | norm(f"{at}{name}.bn", outputs)
        return names

    names = rows(INCEPTION)
    for key, text in REPEATED.items():
        repeat, count, joined, channels = key.split()
        blocks = [f"{repeat}.{i}." for i in range(int(count))] + ["block8."] * (repeat == "repeat_2")
        for at in blocks:
            names |= rows(text, at) | conv(f"{at}conv2d", int(joined), int(channels), 1)
            names |= {f"{at}conv2d.bias": (int(channels),)}
    return names | linear("classif", 1536, 1000)


# (names and shapes, how many, parameters, the classifier)
PUBLISHED = {
    "resnet34-cifar": (resnet(3, (3, 3), 1, 10), 218, 21_282_122, "fc."),
    "resnet50": (resnet(7, (1, 3, 1), 4, 1000), 320, 25_557_032, "fc."),
    "preact-resnet18": (preact(), 102, 11_171_146, "linear."),
    "vgg19-bn": (vgg(), 118, 143_678_248, "classifier.6."),
    "inception-resnet-v2": (inception(), 1306, 55_843_464, "classif."),
}
SPELLED_OUT = {
    "resnet34-cifar": {"layer3.5.conv2.weight": (256, 256, 3, 3), "layer2.0.downsample.1.running_var": (128,)},
    "resnet50": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.2.bn3.running_mean": (2048,),
        "fc.weight": (1000, 2048),
    },
    "preact-resnet18": {"layer4.0.shortcut.0.weight": (512, 256, 1, 1), "layer2.0.bn1.weight": (64,)},
    "vgg19-bn": {
        "features.0.weight": (64, 3, 3, 3),
        "features.49.weight": (512, 512, 3, 3),
        "features.50.num_batches_tracked": (),
        "classifier.0.weight": (4096, 25088),
    },
    "inception-resnet-v2": {
        "conv2d_1a.conv.weight": (32, 3, 3, 3),
        "mixed_5b.branch3.1.bn.running_mean": (64,),
        "repeat.9.conv2d.weight": (320, 128, 1, 1),
        "repeat_1.19.branch1.2.conv.weight": (192, 160, 7, 1),
        "mixed_7a.branch2.2.conv.weight": (320, 288, 3, 3),
        "block8.branch1.1.conv.weight": (224, 192, 1, 3),
        "block8.conv2d.bias": (2080,),
        "classif.weight": (1000, 1536),
    },
}


def on_meta(name):
    with torch.device("meta"):
        return make_backbone(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_sizes_are_the_published_ones(name):
    names, count, parameters, classifier = PUBLISHED[name]
    backbone = on_meta(name)
    mine = {key: tuple(value.shape) for key, value in backbone.state_dict().items()}
    assert mine == {key: shape for key, shape in names.items() if not key.startswith(classifier)}
    assert SPELLED_OUT[name].items() <= names.items()
    assert len(names) == count
    weight = names[f"{classifier}weight"]
    assert weight[1] == backbone.num_features
    assert sum(p.numel() for p in backbone.parameters()) + (weight[1] + 1) * weight[0] == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_loaded(name, tmp_path):
    names, _, _, classifier = PUBLISHED[name]
    # One number a tensor makes a small file: the shape is whole, the storage is not.
    state = {key: torch.tensor(float(i)).expand(shape) for i, (key, shape) in enumerate(names.items())}
    torch.save(state, tmp_path / "weights.pth")
    backbone = on_meta(name).to_empty(device="cpu")
    load_weights(backbone, tmp_path / "weights.pth")
    for key, value in backbone.state_dict().items():
        assert not key.startswith(classifier)
        assert value.flatten()[0] == value.flatten()[-1] == state[key].flatten()[0], key


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGES)
def test_features_of_images_down_to_the_smallest(name):
    backbone, side = on_meta(name).eval(), min_side(name)
    for size in (side, side + 9):
        assert backbone(torch.empty(2, 3, size, size + 1, device="meta")).shape == (2, backbone.num_features)
    if side > 1:
        with pytest.raises(RuntimeError):
            backbone(torch.empty(2, 3, side - 1, side - 1, device="meta"))


@pytest.mark.parametrize("name", IMAGES)
def test_synchronised_and_channels_last(name):
    backbone = on_meta(name)
    keys = list(backbone.state_dict())
    synchronise_batch_norm(backbone)
    backbone = backbone.to(memory_format=torch.channels_last)
    assert sorted(backbone.state_dict()) == sorted(keys)
    assert not any(type(part) is nn.BatchNorm2d for part in backbone.modules())
    side = max(32, min_side(name))
    x = torch.empty(2, 3, side, side, device="meta").to(memory_format=torch.channels_last)
    assert backbone(x).shape == (2, backbone.num_features)


@pytest.mark.parametrize("name", SMALL)
def test_the_layout_in_memory_changes_nothing(name):
    backbone, x = make_backbone(name).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        plain = backbone(x)
        last = backbone.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_the_gradient_reaches_every_parameter(name):
    backbone = make_backbone(name)
    backbone(torch.randn(4, 3, 16, 16)).square().sum().backward()
    for key, parameter in backbone.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize(
    ("name", "side", "sides"),
    [
        ("resnet34-cifar", 32, {"layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4}),
        ("preact-resnet18", 32, {"layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4}),
        ("resnet50", 224, {"layer1": 56, "layer2": 28, "layer3": 14, "layer4": 7, "layer2.0.conv1": 56}),
        ("vgg19-bn", 224, {"features.49": 14, "features": 7, "avgpool": 7}),
        ("inception-resnet-v2", 299, {"conv2d_2b": 147, "repeat": 35, "repeat_1": 17, "repeat_2": 8}),
        ("small-cnn", 32, {"layers.0": 32, "layers.1": 16, "layers.3": 8, "layers": 4}),
    ],
)
def test_the_sides_of_the_image_on_its_way(name, side, sides):
    backbone, seen = on_meta(name).eval(), {}
    for part in sides:
        hook = lambda module, x, y, part=part: seen.update({part: y.shape[-1]})  # noqa: E731
        backbone.get_submodule(part).register_forward_hook(hook)
    backbone(torch.empty(2, 3, side, side, device="meta"))
    assert seen == sides


@pytest.mark.parametrize(
    ("block", "channels", "scale", "floor"),
    [
        (block35(), 320, 0.17, 0.0),
        (block17(), 1088, 0.1, 0.0),
        (block8(), 2080, 0.2, 0.0),
        (block8(last=True), 2080, 1.0, -torch.inf),
    ],
)
def test_residual_blocks_of_inception_are_scaled_and_the_last_has_no_relu(block, channels, scale, floor):
    nn.init.zeros_(block.conv2d.weight)
    nn.init.ones_(block.conv2d.bias)
    x = torch.randn(2, channels, 3, 3)
    torch.testing.assert_close(block(x), (x + scale).clamp(min=floor))


def test_features_of_inception_vary_and_are_of_usual_size():
    features = make_backbone("inception-resnet-v2")(torch.randn(2, 3, 107, 107))
    assert features.isfinite().all()
    assert 0.1 < features.mean() < 2
    assert (features[0] - features[1]).abs().mean() > 0.01


def test_convolutions_start_with_the_variance_of_their_outputs():
    weight = make_backbone("resnet34-cifar").layer4[0].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


def test_the_preact_block_takes_its_shortcut_from_the_activated_input():
    block = make_backbone("preact-resnet18").layer2[0].eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 64, 4, 4)
    torch.testing.assert_close(block(x), block.shortcut(block.bn1(x).relu()))


def test_vgg_gives_its_second_hidden_layer_after_relu():
    backbone = on_meta("vgg19-bn")
    assert [type(layer).__name__ for layer in backbone.classifier] == ["Linear", "ReLU", "Dropout"] * 2


def test_the_fast_cnn_has_a_width():
    assert FastCNN(width=8)(torch.randn(2, 3, 8, 8)).shape == (2, 64)


def test_the_mlp_needs_its_inputs():
    assert make_backbone("mlp", inputs=7)(torch.randn(3, 7)).shape == (3, 512)
    for inputs, sentence in ((None, "inputs is None, wanted the number"), (0, "inputs is 0, wanted a whole number")):
        with pytest.raises(InputError, match=sentence):
            make_backbone("mlp", inputs)
    with pytest.raises(InputError, match="'small-cnn' and inputs is 7, wanted images, or the backbone 'mlp'"):
        make_backbone("small-cnn", 7)


@pytest.mark.parametrize("name", ["resnet34", "timm:", "keras:vgg", ""])
def test_an_unknown_name_is_told_all_names(name):
    for function in (make_backbone, min_side):
        with pytest.raises(InputError, match=f"is '{name}', wanted one of resnet34-cifar, .*, mlp, timm:NAME or torch"):
            function(name)


# Networks of other packages


def install(monkeypatch, module, **functions):
    for name in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[module]).update(functions)


class Foreign(nn.Sequential):
    """Three Linear layers, the last inside another module."""

    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))


def test_a_network_of_timm(monkeypatch):
    def create_model(name, pretrained, num_classes):
        assert (name, pretrained, num_classes) == ("tiny", False, 0)
        model = nn.Linear(6, 4)
        model.num_features, model.default_cfg = 4, {"classifier": "head.fc"}
        return model

    install(monkeypatch, "timm", create_model=create_model)
    backbone = make_backbone("timm:tiny")
    assert (backbone.num_features, backbone.classifier_keys) == (4, ("head.fc.",))
    assert min_side("timm:tiny") == 1


def test_a_network_of_timm_with_a_layer_before_its_classifier(monkeypatch):
    def create_model(name, pretrained, num_classes):
        model = nn.Linear(6, 4)
        model.num_features, model.head_hidden_size = 9, 4
        return model

    install(monkeypatch, "timm", create_model=create_model)
    backbone = make_backbone("timm:tiny")
    assert (backbone.num_features, backbone.classifier_keys) == (4, ())


def test_a_network_of_torchvision_loses_its_last_linear(monkeypatch, tmp_path):
    def get_model(name, weights):
        assert (name, weights) == ("tiny", None)
        return Foreign()

    install(monkeypatch, "torchvision.models", get_model=get_model)
    backbone = make_backbone("torchvision:tiny")
    assert backbone(torch.randn(2, 6)).shape == (2, backbone.num_features) == (2, 4)
    state = Foreign().state_dict()
    torch.save(state, tmp_path / "tiny.pth")
    load_weights(backbone, tmp_path / "tiny.pth")
    torch.testing.assert_close(backbone[1][0].weight, state["1.0.weight"])


def test_a_network_of_torchvision_without_linear_is_refused(monkeypatch):
    install(monkeypatch, "torchvision.models", get_model=lambda name, weights: nn.Conv2d(3, 4, 1))
    with pytest.raises(InputError, match="torchvision:squeezed, which has no Linear layer"):
        make_backbone("torchvision:squeezed")


@pytest.mark.parametrize(("package", "function"), [("timm", "create_model"), ("torchvision", "get_model")])
def test_a_network_a_package_does_not_have(monkeypatch, package, function):
    def fail(name, **options):
        raise RuntimeError(f"Unknown model ({name})\nmany more lines")

    install(monkeypatch, "timm" if package == "timm" else "torchvision.models", **{function: fail})
    with pytest.raises(InputError, match=r"which \w+ cannot make \(Unknown model \(nix\)\), wanted one it has"):
        make_backbone(f"{package}:nix")


@pytest.mark.parametrize("package", ["timm", "torchvision"])
@pytest.mark.parametrize("error", [ImportError("no module"), RuntimeError("operator does not exist"), OSError()])
def test_a_package_that_cannot_be_imported(monkeypatch, package, error):
    def fail(name):
        raise error

    monkeypatch.setattr("fastgnl.backbones.packages.importlib.import_module", fail)
    told = str(error) or "OSError"
    with pytest.raises(InputError, match=rf"{package} cannot be imported \({told}\), wanted it installed"):
        make_backbone(f"{package}:resnet50")


# Weights from files


@pytest.fixture(scope="module")
def trained():
    """A state dict that differs from any new network in every tensor."""
    net = FastCNN(width=4)
    return {key: torch.rand_like(value.float()).to(value.dtype) + 1 for key, value in net.state_dict().items()}


def loaded(path):
    net = FastCNN(width=4)
    load_weights(net, path)
    return net.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_a_file_of_weights(trained, tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    save_file(trained, path) if suffix == ".safetensors" else torch.save(trained, path)
    assert same(loaded(path), trained)


def test_a_file_in_the_old_format_of_torch(trained, tmp_path):
    torch.save(trained, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same(loaded(tmp_path / "old.pth"), trained)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_a_state_dict_inside_a_checkpoint_of_ddp(trained, tmp_path, wrapper):
    inner = {f"module.{key}": value for key, value in trained.items()}
    torch.save({wrapper: inner, "epoch": 3, "optimizer": {}}, tmp_path / "checkpoint.pth")
    assert same(loaded(tmp_path / "checkpoint.pth"), trained)


def test_counters_may_be_missing_and_stay(trained, tmp_path):
    old = {key: value for key, value in trained.items() if not key.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "old.pth")
    state = loaded(tmp_path / "old.pth")
    assert same({key: state[key] for key in old}, old)
    assert all(state[key] == 0 for key in state.keys() - old.keys())


def test_half_precision_is_widened(trained, tmp_path):
    half = {key: value.half() if value.is_floating_point() else value for key, value in trained.items()}
    save_file(half, tmp_path / "half.safetensors")
    assert loaded(tmp_path / "half.safetensors")["layers.0.0.weight"].dtype == torch.float32


FIRST = "layers.0.0.weight"


def without(state):
    del state[FIRST]


def with_more(state):
    state |= {f"extra{i}": torch.zeros(1) for i in range(5)}


def reshaped(state):
    state[FIRST] = torch.zeros(4, 3, 7, 7)


def half_prefixed(state):
    state[f"module.{FIRST}"] = state.pop(FIRST)


def with_a_number(state):
    state["epoch"] = 3


def with_numbered_keys(state):
    state[0] = torch.zeros(1)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without, rf"has no {FIRST}, wanted the 48 tensors of FastCNN"),
        (with_more, "has unknown extra0, extra1, extra2 and 2 more, wanted the 48"),
        (reshaped, rf"has {FIRST} of shape \(4, 3, 7, 7\) for \(4, 3, 3, 3\), wanted"),
        (half_prefixed, rf"has no {FIRST}; unknown module.{FIRST}, wanted"),
        (with_a_number, "has a int under 'epoch', wanted names of tensors alone"),
        (with_numbered_keys, "has a Tensor under 0, wanted names of tensors alone"),
        (dict.clear, "is empty, wanted a state dict"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(trained, tmp_path, spoil, sentence):
    state = dict(trained)
    spoil(state)
    torch.save(state, tmp_path / "weights.pth")
    net = FastCNN(width=4)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match=sentence) as raised:
        load_weights(net, tmp_path / "weights.pth")
    assert "\n" not in str(raised.value)
    assert same(net.state_dict(), before)


def test_the_stem_for_large_images_does_not_fit_the_one_for_small(tmp_path):
    names = resnet(7, (3, 3), 1, 1000)
    torch.save({key: torch.tensor(1.0).expand(shape) for key, shape in names.items()}, tmp_path / "resnet34.pth")
    sentence = r"has conv1.weight of shape \(64, 3, 7, 7\) for \(64, 3, 3, 3\), wanted the 216 tensors of ResNet34Cifar"
    with pytest.raises(InputError, match=sentence):
        load_weights(on_meta("resnet34-cifar"), tmp_path / "resnet34.pth")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(trained, tmp_path):
    torch.save({**trained, "bomb": Bomb(tmp_path / "boom")}, tmp_path / "bomb.pth")
    with pytest.raises(InputError, match=r"bomb.pth tries to load \w+.mkdir, wanted a whole file with tensors alone"):
        loaded(tmp_path / "bomb.pth")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("left", [0, 4, 1000, -1000])
def test_a_file_cut_short(trained, tmp_path, suffix, left):
    path = tmp_path / f"weights{suffix}"
    save_file(trained, path) if suffix == ".safetensors" else torch.save(trained, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InputError, match=f"cannot be read as a {suffix} file, wanted a whole file"):
        loaded(path)


def test_no_file_of_weights(tmp_path):
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "weights.onnx").write_bytes(b"")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    for file, sentence in (
        ("none.pth", "none.pth does not exist, wanted a file of weights"),
        ("folder.pth", "folder.pth is no file, wanted"),
        ("weights.onnx", r"weights.onnx, wanted a .safetensors, .pth, .pt or .bin file"),
        ("list.pth", "list.pth holds a list, wanted a state dict"),
    ):
        with pytest.raises(InputError, match=sentence):
            loaded(Path(tmp_path / file))
