"""Tables of what was measured to be the fastest: written by ``kvkern tune``, read by ``"auto"``."""

import json

import pytest
import torch

import kvkern
from kvkern.__main__ import main
from kvkern._cli import tune
from kvkern.backends import TABLE, MatmulCall, choose, explain, tuned
from kvkern.errors import ArgumentError
from kvkern.warm_up import size_class

CUDA, BF16, E4M3 = torch.device("cuda"), torch.bfloat16, torch.float8_e4m3fn
CALL = MatmulCall(
    a_dtype=E4M3,
    b_dtype=E4M3,
    out_dtype=BF16,
    num_matrices=1,
    is_grouped=False,
    num_rows=3000,
    num_columns=2112,
    depth=7168,
    cell_a=(0, 0),
    cell_b=(0, 0),
    a_is_aligned=True,
    b_is_aligned=True,
    out_is_aligned=True,
    bias_dtype=None,
    is_exact=True,
)
KIND = tuned.Kind("scaled_mm", "tensor", "exact", "float8_e4m3fn", "bfloat16", 4096, 2112, 7168)


def row_of(kind, fastest, **us):
    return {**kind._asdict(), "fastest": fastest, "us": us}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """A Hopper card called Some Card, and a function that writes a table of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    monkeypatch.delenv("KVKERN_TUNED", raising=False)

    def forget():
        choose.cache_clear()
        tuned._rows.cache_clear()

    def write(rows, file="some_card.json", card="Some Card"):
        tuned.write(tmp_path / file, card, rows)
        forget()
        return tmp_path / file

    forget()
    yield write
    forget()


def auto(call):
    rows = explain("scaled_mm", CUDA, BF16, call)
    return next(name for name, reason in rows if reason is None)


def test_auto_takes_what_the_table_says_for_its_layer_and_rows(tables):
    assert auto(CALL) == "hopper"
    tables([row_of(KIND, "torch", hopper=2.0, torch=1.0)])
    for num_rows in (2049, 3000, 4096):
        assert auto(CALL._replace(num_rows=num_rows)) == "torch"
        run = choose("scaled_mm", "auto", CUDA, BF16, CALL._replace(num_rows=num_rows))
        assert run.__module__ == "kvkern.backends.torch_scaled_mm"
    for other in (
        {"num_rows": 2048},
        {"num_rows": 4097},
        {"num_columns": 2048},
        {"depth": 512},
        {"is_exact": False},
        {"cell_a": (1, 0), "cell_b": (0, 1)},
        {"cell_a": (1, 0)},  # rows x tensor: no table has it
        {"b_dtype": torch.float8_e5m2},
        {"a_dtype": torch.float8_e5m2, "b_dtype": torch.float8_e5m2},
        {"out_dtype": torch.float16},
        {"num_matrices": 2},
        {"is_grouped": True},
    ):
        assert auto(CALL._replace(**other)) != "torch"
    reasons = dict(explain("scaled_mm", CUDA, BF16, CALL))
    assert "faster" in reasons["hopper"] and reasons["torch"] is None


def test_a_backend_that_refuses_is_not_taken_however_fast_it_was(tables):
    tables([row_of(KIND, "torch", hopper=2.0, torch=1.0)])
    assert auto(CALL._replace(b_is_aligned=False)) == "triton"
    tables([row_of(KIND, "no such backend", hopper=2.0)])
    assert auto(CALL) == "hopper"


def test_rows_in_between_go_by_the_next_that_were_measured_up_to_twice_as_many(tables):
    more = KIND._replace(rows=3072)
    tables([row_of(KIND, "torch", hopper=2.0, torch=1.0), row_of(more, "triton", triton=1.0)])
    chosen = {n: auto(CALL._replace(num_rows=n)) for n in (1536, 1537, 3072, 3073, 4096, 4097)}
    assert list(chosen.values()) == ["hopper", "triton", "triton", "torch", "torch", "hopper"]


def test_next_fastest_is_taken_where_the_fastest_refuses(tables):
    """DeepGEMM may be faster, and is not installed everywhere."""
    tables([row_of(KIND, "deepgemm", hopper=3.0, triton=2.5, torch=2.0, deepgemm=1.0)])
    assert auto(CALL) == "torch"
    assert auto(CALL._replace(bias_dtype=torch.float32)) == "triton"  # torch wants out's dtype


def test_a_named_backend_does_not_ask_the_table(tables):
    tables([row_of(KIND, "torch", hopper=2.0, torch=1.0)])
    run = choose("scaled_mm", "triton", CUDA, BF16, CALL)
    assert run.__module__ == "kvkern.kernels.scaled_mm"


def test_tables_of_other_cards_and_versions_are_not_read(tables, monkeypatch):
    rows = [row_of(KIND, "torch", hopper=2.0, torch=1.0)]
    tables(rows, file="some_card.json", card="Some Other Card")
    assert auto(CALL) == "hopper"
    file = tables(rows)
    assert tuned.read(file, "Some Card") == {KIND: ("torch", "hopper")}
    monkeypatch.setattr(tuned, "versions", lambda: {"torch": "1.0.0", "triton": "0.1"})
    assert tuned.read(file, "Some Card") == {}


def test_the_users_table_goes_before_the_shipped_one(tables, monkeypatch, tmp_path):
    tables([row_of(KIND, "torch", hopper=2.0, torch=1.0)])
    assert auto(CALL) == "torch"
    mine = tables([row_of(KIND, "triton", hopper=2.0, triton=1.0)], file="mine.json")
    monkeypatch.setenv("KVKERN_TUNED", str(mine))
    tuned._rows.cache_clear()
    assert auto(CALL) == "triton"


@pytest.mark.parametrize("text", [None, "", "no JSON", "{}", '{"card": "Some Card"}'])
def test_a_users_table_that_is_none_is_told_by_the_variables_name(
    text, tables, monkeypatch, tmp_path
):
    mine = tmp_path / "mine.json"
    if text is not None:
        mine.write_text(text)
    monkeypatch.setenv("KVKERN_TUNED", str(mine))
    with pytest.raises(ArgumentError, match=r"KVKERN_TUNED: want a file .* tune wrote, got .*mine"):
        auto(CALL)
    monkeypatch.setenv("KVKERN_TUNED", str(tmp_path))
    with pytest.raises(ArgumentError, match="KVKERN_TUNED"):
        auto(CALL)
    monkeypatch.setenv("KVKERN_TUNED", "")  # as if it were not set
    assert auto(CALL) == "hopper"


def test_versions_are_those_of_what_compiles_and_multiplies(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.8.7+cu999")
    monkeypatch.setattr(tuned.metadata, "version", {"triton": "6.5.4"}.__getitem__)
    assert tuned.versions() == {"torch": "9.8.7", "triton": "6.5.4"}


@pytest.mark.parametrize("file", sorted(tuned.SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_tables_name_backends_and_what_was_the_fastest(file):
    table = json.loads(file.read_text())
    assert file.name == tuned.file_name(table["card"])
    names = [backend.name for backend in TABLE["scaled_mm"]]
    kinds = [tuned.Kind(*(row[name] for name in tuned.Kind._fields)) for row in table["rows"]]
    assert len(set(kinds)) == len(kinds) > 0
    for row in table["rows"]:
        assert row["rows"] == size_class(row["rows"])  # else no call finds it
        assert set(row["us"]) <= set(names) and row["fastest"] in row["us"]
        assert "deepgemm" not in row["us"]  # it compiles while serving: only by name
        assert row["us"][row["fastest"]] <= min(row["us"].values()) / 0.98


@pytest.fixture
def times(monkeypatch):
    """Pretended times of four backends, of which one is wrong and one refuses most calls."""

    def scaled_mm(a, b, scale_a, scale_b, *, accumulation="exact", backend="auto", **options):
        if backend == "deepgemm" and scale_a.shape[1:] != (2,):
            raise kvkern.UnsupportedError("scaled_mm: backend 'deepgemm' refuses: takes groups")
        out = reference(a, b, scale_a, scale_b, backend="reference", **options)
        return out * 1.1 if backend == "triton" else out

    reference = kvkern.scaled_mm
    us = {"hopper": 10.0, "triton": 1.0, "torch": 5.0, "deepgemm": 2.0}
    monkeypatch.setattr(kvkern, "scaled_mm", scaled_mm)
    monkeypatch.setattr(tune, "_times", lambda calls, device: {name: us[name] for name in calls})
    return us


def tune_here(tmp_path, *more):
    file = tmp_path / "table.json"
    arguments = ["--device", "cpu", "--out", str(file), "--layers", "40x200", "--rows", "3", *more]
    return main(["tune", *arguments]), json.loads(file.read_text())


def test_tune_leaves_out_what_is_wrong_and_names_the_fastest(times, tmp_path, capsys):
    status, table = tune_here(tmp_path)
    assert status == 1 and "triton is WRONG" in capsys.readouterr().out
    assert table["card"] == "cpu" and table["versions"] == tuned.versions()
    assert len(table["rows"]) == 5  # kinds of scales and sums
    for row in table["rows"]:
        assert (row["columns"], row["depth"], row["rows"]) == (40, 200, 4)
        assert row["us"] == {"hopper": 10.0, "torch": 5.0} and row["fastest"] == "torch"
    assert {row["scales"] for row in table["rows"]} == {"tensor", "row", "block"}


@pytest.fixture
def one_is_spoilt(times, monkeypatch):
    """A function that has a backend's results changed; those of others are right."""

    def spoil(name, change):
        def scaled_mm(*given, backend="auto", **options):
            out = pretended(*given, backend=backend, **options)
            return change(out) if backend == name else out

        monkeypatch.setattr(kvkern, "scaled_mm", scaled_mm)

    pretended = kvkern.scaled_mm
    return spoil


@pytest.mark.parametrize("num_rows", ["1", "17", "40"])
def test_tune_leaves_out_a_result_wrong_in_its_last_row(one_is_spoilt, num_rows, tmp_path, capsys):
    def without_last_row(out):
        out[-1] = 0
        return out

    one_is_spoilt("torch", without_last_row)
    status, table = tune_here(tmp_path, "--backends", "hopper", "torch", "--rows", num_rows)
    assert status == 1 and capsys.readouterr().out.count("torch is WRONG") == 5
    assert [list(row["us"]) for row in table["rows"]] == [["hopper"]] * 5


def test_tune_leaves_out_biased_sums_where_they_are_to_be_exact(one_is_spoilt, tmp_path, capsys):
    """By half a percent, which fast sums may be, and which is within bf16's budget."""
    one_is_spoilt("torch", lambda out: out * 0.995)
    status, table = tune_here(tmp_path, "--backends", "hopper", "torch", "--rows", "1", "40")
    assert status == 1 and capsys.readouterr().out.count("relative bias: want") == 6
    names = {(row["accumulation"], *row["us"]) for row in table["rows"]}
    assert names == {("fast", "hopper", "torch"), ("exact", "hopper")}


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_tune_lets_other_errors_through(one_is_spoilt, error, tmp_path):
    """Of a backend, an assertion too: one that a result fails is tune's own."""

    def fail(out):
        raise error("from within")

    one_is_spoilt("torch", fail)
    with pytest.raises(error, match="from within"):
        tune_here(tmp_path)


def test_tune_says_once_for_a_layer_and_its_scales_who_refuses_and_why(times, tmp_path, capsys):
    more = ["--rows", "3", "5", "--layers", "40x200", "24x200"]
    tune_here(tmp_path, "--backends", "torch", "deepgemm", *more)
    lines = [line for line in capsys.readouterr().out.splitlines() if "refuses" in line]
    assert lines == [
        f"{scales} 3 x {columns} x 200: scaled_mm: backend 'deepgemm' refuses: takes groups"
        for columns in (40, 24)
        for scales in ("tensor fast", "tensor exact", "row fast", "row exact")
    ]


def test_tune_prefers_the_first_backend_for_less_than_one_percent(times, tmp_path):
    times.update(torch=9.95, triton=100.0)
    _, table = tune_here(tmp_path)
    assert {row["fastest"] for row in table["rows"]} == {"hopper"}


def test_tune_times_the_backends_it_is_given(times, tmp_path):
    status, table = tune_here(tmp_path, "--backends", "torch", "deepgemm")
    by_both = {"torch": 5.0, "deepgemm": 2.0}
    assert status == 0 and [row["us"] for row in table["rows"]] == [{"torch": 5.0}] * 4 + [by_both]


def test_tune_fails_where_no_backend_takes_a_call(monkeypatch, tmp_path):
    def refuse(*args, **options):
        if options["backend"] != "reference":
            raise kvkern.UnsupportedError("refuses")
        return reference(*args, **options)

    reference = kvkern.scaled_mm
    monkeypatch.setattr(kvkern, "scaled_mm", refuse)
    status, table = tune_here(tmp_path)
    assert status == 1 and table["rows"] == []


@pytest.mark.parametrize("layer", ["40", "x40", "40x", "0x8", "axb"])
def test_tune_says_what_a_layer_is(layer, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--out", str(tmp_path / "t.json"), "--layers", layer])
    assert "want a number >= 1" in capsys.readouterr().err
