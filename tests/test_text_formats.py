"""Text formats: a miniature of each published layout, with its traps."""

import gzip
import json
import pickle

import numpy as np
import pytest

from fastgnl.errors import InputError
from fastgnl.formats.listing import UNKNOWN
from fastgnl.formats.text import AGNews, Jsonl, Newsgroups20

AG_NEWS = r""""3","Wall St. ""Bears"" Claw Back","Short-sellers, Wall Street's dwindling\band, see\ngreen."
"4","Café, opened","A comma, and a € sign"
"1","Talks","Two
lines"
"2","Cup","Won"
"""


def texts(listing):
    return [listing.read(i) for i in range(len(listing))]


def refused(call, *parts):
    with pytest.raises(InputError) as error:
        call()
    sentence = str(error.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


@pytest.fixture
def ag_news(tmp_path):
    (tmp_path / "train.csv").write_text(AG_NEWS, encoding="utf-8")
    (tmp_path / "test.csv").write_text('"2","Only","Test"\r\n', encoding="utf-8")
    return tmp_path


def test_ag_news_rows_become_texts(ag_news):
    listing = AGNews().listing(ag_news)
    assert listing.kind == "text"
    assert listing.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert listing.labels.tolist() == [2, 3, 0, 1]
    assert listing.clean.tolist() == [2, 3, 0, 1]
    assert texts(listing) == [
        'Wall St. "Bears" Claw Back Short-sellers, Wall Street\'s dwindling band, see green.',
        "Café, opened A comma, and a € sign",
        "Talks Two\nlines",
        "Cup Won",
    ]
    # A row that spans lines is named by its first, and the next row by its own.
    assert list(listing.names) == ["train.csv:1", "train.csv:2", "train.csv:3", "train.csv:5"]
    assert texts(AGNews("test").listing(ag_news)) == ["Only Test"]


def test_ag_news_of_kaggle_has_a_header_and_a_byte_order_mark(ag_news):
    (ag_news / "train.csv").write_text("Class Index,Title,Description\n3,Plain,No quotes\n\n", encoding="utf-8-sig")
    listing = AGNews().listing(ag_news)
    assert texts(listing) == ["Plain No quotes"]
    assert listing.labels.tolist() == [2]
    assert listing.names[0] == "train.csv:2"


def test_ag_news_classes_come_from_their_file(ag_news):
    (ag_news / "classes.txt").write_text("A\r\nB\r\nC\r\nD\r\nE\r\n", newline="")
    assert AGNews().listing(ag_news).classes == ("A", "B", "C", "D", "E")
    (ag_news / "classes.txt").write_text("A\nB\nC\n")
    refused(lambda: AGNews().listing(ag_news), "train.csv, line 2 has class '4', wanted 1 to 3")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('"5","a","b"', "line 6 has class '5', wanted 1 to 4"),
        ('"0","a","b"', "line 6 has class '0', wanted 1 to 4"),
        ('"World","a","b"', "line 6 has class 'World', wanted 1 to 4"),
        ('"1","a"', "line 6 has 2 column(s), wanted 3"),
        ('"1","a","b","c"', "line 6 has 4 column(s), wanted 3"),
        ('"1","a","never closed', "line 6 is not CSV"),
        ('"1","a"b","c"', "line 6 is not CSV"),
        ('"1","a","\udcff"', "line 6 is not UTF-8"),
        ("Class Index,Title,Description", "line 6 has class 'Class Index'"),
    ],
)
def test_ag_news_names_the_line_it_refuses(ag_news, line, sentence):
    (ag_news / "train.csv").write_bytes((AG_NEWS + line + "\n").encode("utf-8", "surrogateescape"))
    refused(lambda: AGNews().listing(ag_news), str(ag_news / "train.csv"), sentence)


def test_ag_news_needs_its_folder(tmp_path):
    refused(lambda: AGNews("test").listing(tmp_path), "test.csv does not exist", "wanted the AG News folder")
    refused(lambda: AGNews("val"), "split is 'val', wanted one of 'train', 'test'")


@pytest.fixture
def newsgroups(tmp_path):
    posts = {
        "20news-bydate-train/sci.space/60000": b"From: a\nSubject: b\n\nCaf\xe9 in orbit\n\nBye",
        "20news-bydate-train/sci.space/9000": b"From: a\n\nFirst by number",
        "20news-bydate-train/alt.atheism/49960": b"From: c\r\n\r\nDos lines\r\n",
        "20news-bydate-train/alt.atheism/.DS_Store": b"rubbish",
        "20news-bydate-train/.DS_Store": b"rubbish",
        "20news-bydate-train/misc.forsale/1": b"\nNo headers",
        "20news-bydate-train/misc.forsale/2": b"Subject: headers only\n",
        "20news-bydate-test/sci.space/70000": b"From: d\n\nTest",
        "20news-bydate-test/.hidden/1": b"From: e\n\nNot a class",
    }
    for name, content in posts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_newsgroups_are_listed_by_class_and_number(newsgroups):
    listing = Newsgroups20().listing(newsgroups)
    assert listing.kind == "text"
    assert listing.classes == ("alt.atheism", "misc.forsale", "sci.space")
    assert [name.removeprefix("20news-bydate-train/") for name in listing.names] == [
        "alt.atheism/49960",
        "misc.forsale/1",
        "misc.forsale/2",
        "sci.space/9000",
        "sci.space/60000",
    ]
    assert listing.labels.tolist() == listing.clean.tolist() == [0, 1, 1, 2, 2]
    assert texts(listing) == ["Dos lines\n", "No headers", "", "First by number", "Café in orbit\n\nBye"]
    assert pickle.loads(pickle.dumps(listing.read))(3) == "First by number"  # what worker processes need


def test_newsgroups_keep_headers_on_demand(newsgroups):
    assert Newsgroups20(strip="none").listing(newsgroups).read(3) == "From: a\n\nFirst by number"


def test_a_class_that_the_test_split_lacks_keeps_its_number(newsgroups):
    listing = Newsgroups20("test").listing(newsgroups)
    assert listing.classes == ("alt.atheism", "misc.forsale", "sci.space")
    assert listing.labels.tolist() == [2]
    assert texts(listing) == ["Test"]


def test_newsgroups_need_their_folder(tmp_path):
    refused(lambda: Newsgroups20().listing(tmp_path), "20news-bydate-train does not exist", "20news-bydate-test")
    refused(lambda: Newsgroups20(strip="quotes"), "strip is 'quotes', wanted one of 'headers', 'none'")


def jsonl(folder, *rows, name="data.jsonl"):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    content = "".join(line + "\n" for line in lines).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder / name


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_jsonl_finds_its_classes(tmp_path, name):
    rows = [{"text": "one\u2028line", "label": "b"}, "", {"text": "é", "label": "a", "more": 1}]
    listing = Jsonl().listing(jsonl(tmp_path, *rows, name=name))
    assert listing.classes == ("a", "b")
    assert listing.labels.tolist() == [1, 0]
    assert listing.clean is None
    assert texts(listing) == ["one\u2028line", "é"]
    assert list(listing.names) == [f"{name}:1", f"{name}:3"]


def test_jsonl_numbers_keep_their_order(tmp_path):
    listing = Jsonl().listing(jsonl(tmp_path, *({"text": "", "label": n} for n in (10, 2, 0))))
    assert listing.classes == tuple(map(str, range(11)))
    assert listing.labels.tolist() == [10, 2, 0]


def test_jsonl_has_keys_of_ones_own_and_clean_labels(tmp_path):
    rows = [{"body": "x", "y": "cat", "true": "dog"}, {"body": "y", "y": "cat", "true": None}]
    listing = Jsonl(text="body", label="y", clean="true").listing(jsonl(tmp_path, *rows))
    assert listing.classes == ("cat", "dog")
    assert listing.labels.tolist() == [0, 0]
    assert listing.clean.tolist() == [1, UNKNOWN]
    assert texts(listing) == ["x", "y"]


@pytest.mark.parametrize(("name", "content"), [("c.txt", "zebra\nant\nbee\n"), ("c.json", '["zebra", "ant", "bee"]')])
def test_jsonl_takes_classes_from_a_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    rows = [{"text": "", "label": "ant", "clean": 0}, {"text": "", "label": "zebra", "clean": 2}]
    listing = Jsonl(clean="clean", classes=tmp_path / name).listing(jsonl(tmp_path, *rows))
    assert listing.classes == ("zebra", "ant", "bee")
    assert listing.labels.tolist() == [1, 0]
    assert listing.clean.tolist() == [0, 2]
    rows[1]["label"] = "cow"
    refused(lambda: Jsonl(classes=tmp_path / name).listing(jsonl(tmp_path, *rows)), "line 2 has label 'cow'")
    rows[1]["label"] = 3
    refused(lambda: Jsonl(classes=tmp_path / name).listing(jsonl(tmp_path, *rows)), "line 2 has label 3, wanted 0 to 2")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ('{"text": "a", "label": ', "line 2 is not JSON"),
        ("[1]", "line 2 is list in JSON, wanted an object"),
        ({"label": "a"}, "line 2 has no key 'text'"),
        ({"text": "a"}, "line 2 has no key 'label'"),
        ({"text": 1, "label": "a"}, "line 2 has 'text' of type int, wanted a string"),
        ({"text": "a", "label": True}, "line 2 has 'label' of type bool"),
        ({"text": "a", "label": 1.0}, "line 2 has 'label' of type float, wanted a string or a whole number"),
        ({"text": "a", "label": None}, "line 2 has 'label' of type NoneType"),
        ({"text": "a", "label": 1}, "line 2 has label 1, wanted a string as before it"),
        (r'{"text": "\ud800", "label": "a"}', "line 2 has half a surrogate pair in 'text'"),
    ],
)
def test_jsonl_names_the_line_it_refuses(tmp_path, row, sentence):
    path = jsonl(tmp_path, {"text": "a", "label": "a"}, row)
    refused(lambda: Jsonl().listing(path), str(path), sentence)


def test_jsonl_refuses_numbers_that_are_no_classes(tmp_path):
    good = {"text": "a", "label": 1}
    refused(lambda: Jsonl().listing(jsonl(tmp_path, good, {"text": "", "label": -1})), "line 2 has label -1, wanted 0")
    refused(lambda: Jsonl().listing(jsonl(tmp_path, good, {"text": "", "label": 10**12})), "label 1000000000000")
    refused(lambda: Jsonl(clean="c").listing(jsonl(tmp_path, good)), "line 1 has no key 'c'")


def test_jsonl_refuses_files_it_cannot_read(tmp_path):
    refused(lambda: Jsonl().listing(tmp_path / "none.jsonl"), "none.jsonl does not exist, wanted a .jsonl")
    refused(lambda: Jsonl().listing(tmp_path), "cannot be read")
    whole = jsonl(
        tmp_path, *({"text": str(np.random.default_rng(i).random(9)), "label": i} for i in range(99)), name="a.gz"
    )
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole.read_bytes()[:-20])
    refused(lambda: Jsonl().listing(cut), "cut.jsonl.gz cannot be read after line", "wanted a gzip file")
    cut.write_bytes(b"not gzip")
    refused(lambda: Jsonl().listing(cut), "cut.jsonl.gz cannot be read after line 0")
    refused(lambda: Jsonl().listing(jsonl(tmp_path)), "lists no samples")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("c.txt", "a\n\nb\n", "holds an empty name"),
        ("c.txt", "", "holds an empty name"),
        ("c.txt", "a\nb\na\n", "names 'a' 2 times"),
        ("c.json", '{"a": 1}', "is not a JSON list of strings"),
        ("c.json", "[0, 1]", "is not a JSON list of strings"),
        ("c.json", "a\nb\n", "is not a JSON list of strings"),
    ],
)
def test_files_of_classes_are_checked(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    path = jsonl(tmp_path, {"text": "a", "label": "a"})
    refused(lambda: Jsonl(classes=tmp_path / name).listing(path), str(tmp_path / name), sentence)
    refused(lambda: Jsonl(classes=tmp_path / "missing").listing(path), "missing does not exist")
