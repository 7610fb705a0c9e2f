"""Names and paths of models, as a setting or an option has them: any path can be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ryzanstein.files.model_paths import model_location, model_name
from ryzanstein.files.named_paths import read_option, read_setting, write_setting

ODD = ["/m/a,b", "/m/x=y", "/m/with space/ü\n", '/m/"quoted"', "{brace"]


def test_a_setting_of_any_paths_is_read_as_it_was_written() -> None:
    pairs = [(f"name {number}", path) for number, path in enumerate(ODD)] + [("a=b,c", "/m")]
    assert read_setting(write_setting([(name, Path(path)) for name, path in pairs])) == pairs
    assert write_setting([]) == ""
    assert read_setting("") == []


def test_the_form_with_commas_stays_what_it_was() -> None:
    assert read_setting(" /m/a, two=/m/b ,a=b=/m/c,") == [("", "/m/a"), ("two", "/m/b"), ("a=b", "/m/c")]


@pytest.mark.parametrize("wrong", ["{", '{"a": 1}', '{"a": {"b": "c"}}', '{"a": "b"} c', "{" * 100_000])
def test_what_begins_like_an_object_and_is_none_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        read_setting(wrong)


def test_what_exists_decides_where_the_name_of_an_option_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a=b", "c", "d=e"):
        Path(name).mkdir()
    assert read_option("a=b") == ("", Path("a=b"))
    assert read_option("x=a=b") == ("x", Path("a=b"))
    assert read_option("x=y=c") == ("x=y", Path("c"))
    assert read_option("x=d=e") == ("x", Path("d=e"))
    assert read_option("x=y=missing") == ("x", Path("y=missing"))
    assert read_option("missing") == ("", Path("missing"))


def test_a_link_gives_its_own_name_and_the_place_it_leads_to(tmp_path, monkeypatch) -> None:
    (tmp_path / "blobs" / "3f9c").mkdir(parents=True)
    (tmp_path / "blobs" / "77aa").touch()
    (tmp_path / "smol").symlink_to("blobs/3f9c")
    (tmp_path / "smol.gguf").symlink_to("blobs/77aa")
    assert model_name(tmp_path / "smol") == "smol"
    assert model_location(tmp_path / "smol") == tmp_path / "blobs" / "3f9c"
    assert model_name(tmp_path / "smol.gguf") == "smol"
    assert model_location(tmp_path / "smol.gguf") == tmp_path / "smol.gguf"  # its target's name would not say what it is
    monkeypatch.chdir(tmp_path / "blobs" / "3f9c")
    assert [model_name(Path(given)) for given in (".", "..", "../3f9c/", "./")] == ["3f9c", "blobs", "3f9c", "3f9c"]
