"""Texts as batches of tokens: tokenised once, padded batch by batch, bucketed; encoders of every kind of folder."""

import numpy as np
import pytest
import torch

from fastgnl.convert import convert
from fastgnl.errors import InputError
from fastgnl.formats.embedded import Digits
from fastgnl.formats.listing import Listing
from fastgnl.image_file import ImageFile
from fastgnl.loader import Loader, once
from fastgnl.order import TOGETHER, bucketed, rank_lanes

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from fastgnl import miniature  # noqa: E402
from fastgnl.encoder import load_encoder, load_tokenizer  # noqa: E402
from fastgnl.text_file import TextFile  # noqa: E402


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A file of 60 texts of 1 to 60 words, and a tiny encoder."""
    folder = tmp_path_factory.mktemp("texts")
    words = [" ".join(["word", *["other"] * i]) for i in range(60)]
    labels = np.arange(60) % 3
    order = np.random.default_rng(0).permutation(60)
    listing = Listing("made", "text", ("a", "b", "c"), labels[order], labels[order], [f"{i}" for i in order],
                      [words[i] for i in order].__getitem__)  # fmt: skip
    convert(listing, folder / "train.beton", quiet=True)
    miniature.tiny_encoder(folder / "encoder", folder / "train.beton")
    return folder


def test_tokens_are_those_of_the_tokenizer_and_kept(texts, monkeypatch):
    tokenizer = load_tokenizer(str(texts / "encoder"))
    file = TextFile(texts / "train.beton", tokenizer, 16)
    assert file.cache.exists()
    (x,) = file.load([np.arange(5)])
    wanted = [tokenizer(file.beton.text(row), truncation=True, max_length=16)["input_ids"] for row in range(5)]
    assert x.shape == (5, max(map(len, wanted)))
    for row, ids in zip(x.tolist(), wanted, strict=True):
        assert row == ids + [0] * (x.shape[1] - len(ids))
    monkeypatch.setattr(TextFile, "_tokens", lambda self: pytest.fail("tokenised again"))
    again = TextFile(texts / "train.beton", tokenizer, 16)
    np.testing.assert_array_equal(again.tokens, file.tokens)


def test_a_spoilt_cache_is_made_again(texts):
    tokenizer = load_tokenizer(str(texts / "encoder"))
    file = TextFile(texts / "train.beton", tokenizer, 12)
    file.cache.write_bytes(file.cache.read_bytes()[:50])
    np.testing.assert_array_equal(TextFile(texts / "train.beton", tokenizer, 12).tokens, file.tokens)


def test_another_length_is_another_cache(texts):
    tokenizer = load_tokenizer(str(texts / "encoder"))
    a, b = (TextFile(texts / "train.beton", tokenizer, length) for length in (8, 10))
    assert a.cache != b.cache
    assert (a.lengths.max(), b.lengths.max()) == (8, 10)


def test_bucketed_batches_pad_less_and_visit_each_text_once(texts):
    file = TextFile(texts / "train.beton", load_tokenizer(str(texts / "encoder")), 64)
    padding = {}
    for order in ("random", "bucketed"):
        batches = list(Loader(file, 4, seed=1, order=order).epoch(0))
        index = torch.cat([batch.index for batch in batches])
        assert index.sort().values.tolist() == list(range(60))
        padding[order] = sum(int((batch.x == 0).sum()) for batch in batches)
    assert padding["bucketed"] < 0.7 * padding["random"]
    lengths = [batch.x.shape[1] for batch in once(file)]
    assert lengths == sorted(lengths)


def test_the_order_of_buckets():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    a, b, other = bucketed(lengths, 16, 3, 0), bucketed(lengths, 16, 3, 0), bucketed(lengths, 16, 3, 1)
    np.testing.assert_array_equal(a, b)
    assert (a != other).any()
    visited = a[a >= 0]
    assert len(visited) == len(set(visited.tolist())) == 1000
    spread = [np.ptp(lengths[column[column >= 0]]) for column in a.T]
    assert np.mean(spread) < 99 * 2 * TOGETHER / a.shape[1] + 15
    halves = [rank_lanes(a, rank, 2) for rank in range(2)]
    assert not set(halves[0][halves[0] >= 0].tolist()) & set(halves[1][halves[1] >= 0].tolist())
    mine = set(rank_lanes(other, 0, 2).ravel().tolist()) - {-1}
    assert mine == set(halves[0].ravel().tolist()) - {-1}


def test_texts_of_one_length_are_mixed():
    """A file in the order of its classes: batches hold all of them, others in each epoch."""
    labels = np.arange(1600) // 400
    schedule = bucketed(np.full(1600, 40), 32, 0, 0)
    assert min(len(np.unique(labels[column])) for column in schedule.T) == 4
    assert {frozenset(column) for column in schedule.T} != {
        frozenset(column) for column in bucketed(np.full(1600, 40), 32, 0, 1).T
    }


def test_pooling(texts):
    """Padding changes no text's vector; the mean is over the text's own tokens, standardised."""
    ids = torch.tensor([[2, 4, 5, 3, 0, 0], [2, 4, 5, 4, 5, 3]])
    for pooling in ("cls", "mean"):
        encoder = load_encoder(str(texts / "encoder"), pooling).eval()
        out = encoder(ids)
        assert out.shape == (2, encoder.num_features) == (2, 64)
        torch.testing.assert_close(out[:1], encoder(ids[:1, :4]), rtol=1e-4, atol=1e-5)
    hidden = encoder.model(input_ids=ids[:1, :4]).last_hidden_state
    mean = hidden[0].mean(0)
    torch.testing.assert_close(out[0], (mean - mean.mean()) / mean.std(correction=0), rtol=1e-3, atol=1e-4)
    assert all(weight.requires_grad for weight in encoder.parameters())
    encoder(ids).sum().backward()
    assert all(weight.grad is not None for weight in encoder.parameters())


def test_bert_base_has_its_known_size():
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.BertConfig())
    count = sum(weight.numel() for weight in model.parameters())
    assert count == 109_482_240


def test_new_weights_or_those_of_the_folder(texts):
    a, b = (load_encoder(str(texts / "encoder")).state_dict() for _ in range(2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    torch.manual_seed(1)
    other = load_encoder(str(texts / "encoder"), weights=False).state_dict()
    name = "model.embeddings.word_embeddings.weight"
    assert not torch.equal(a[name], other[name])


@pytest.mark.parametrize("load", [load_encoder, load_tokenizer])
def test_an_encoder_that_is_not_there(load, tmp_path, monkeypatch):
    monkeypatch.setattr("fastgnl.encoder._reachable", lambda: False)
    with pytest.raises(InputError, match="no model hub can be reached, wanted the folder of a local model"):
        load("no-such/model")
    with pytest.raises(InputError, match=r"is the folder .* which cannot be loaded"):
        load(str(tmp_path))


def test_images_are_no_texts(texts, tmp_path):
    convert(Digits("test").listing(), tmp_path / "digits.beton", quiet=True)
    with pytest.raises(InputError, match="holds image, wanted texts"):
        TextFile(tmp_path / "digits.beton", load_tokenizer(str(texts / "encoder")))
    images = ImageFile(tmp_path / "digits.beton", reader="builtin")
    with pytest.raises(InputError, match="order is 'bucketed' for samples of one length, wanted texts"):
        Loader(images, order="bucketed")
