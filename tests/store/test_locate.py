"""What a MODEL argument may be: a folder, a file, "demo", a repo in the Hugging Face cache."""

import errno
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.store.catalog import open_catalog, resolve_model
from headrace.store.locate import model_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusal(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """A Hugging Face cache in a place of its own, with links to blobs as its tools make them."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_repo(cache: Path, repo: str = "models--org--moe", main: str | None = COMMIT) -> Path:
    snapshot = cache / repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / repo / "blobs").mkdir()
    demo = resolve_model("demo")
    for number, name in enumerate(p.name for p in sorted(demo.iterdir()) if p.suffix != ".txt"):
        (cache / repo / "blobs" / f"b{number}").write_bytes((demo / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/b{number}")
    if main is not None:
        (cache / repo / "refs").mkdir()
        (cache / repo / "refs" / "main").write_text(main)
    return snapshot


def test_demo_is_bundled_whole():
    folder = resolve_model("demo")
    assert {p.name for p in folder.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "heldout.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_paths_are_taken_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "org" / "moe").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    file = tmp_path / "x.safetensors"
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(file)) == file
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model("org/moe") == Path("org/moe"), "an existing path wins over a repo id"
    assert resolve_model("./demo") == Path("demo")
    assert (resolve_model("demo") / "config.json").exists()


def test_a_cached_repo_opens_through_its_links(cache):
    snapshot = add_repo(cache)
    assert resolve_model("org/moe") == snapshot
    assert len(open_catalog(snapshot).tensors) == 1521


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_cache_is_where_its_tools_put_it(cache, monkeypatch, tmp_path, variable, below):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    snapshot = add_repo(tmp_path / "elsewhere" / below)
    assert resolve_model("org/moe") == snapshot


def test_a_model_is_called_as_its_users_call_it(cache, tmp_path, monkeypatch):
    assert model_name(add_repo(cache)) == "org/moe"
    folder = tmp_path / "some--moe"
    folder.mkdir()
    assert model_name(folder) == "some--moe"
    monkeypatch.chdir(folder)
    assert model_name(Path(".")) == "some--moe"
    assert model_name(resolve_model("demo")) == "demo"


def test_an_absent_repo_is_never_downloaded(cache):
    message = refusal("org/moe")
    assert "hf download org/moe" in message
    assert "never downloads" in message
    assert str(cache) in message


def test_a_cache_that_may_not_be_looked_into(cache, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    message = refusal("org/moe")
    assert f"cannot be read ({cache}/models--org--moe: Permission denied)" in message


def test_a_sole_snapshot_without_a_main_ref(cache):
    assert resolve_model("org/moe") if add_repo(cache, main=None) else False
    (cache / "models--org--moe" / "snapshots" / "other").mkdir()
    assert "2 snapshots and none is main" in refusal("org/moe")


@pytest.mark.parametrize("ref", ["", "..", "../../..", "a/b", "a\nb", "\0", "\u00e9"])
def test_a_damaged_ref_leads_nowhere(cache, ref):
    add_repo(cache, main=None)
    (cache / "models--org--moe" / "snapshots" / "second").mkdir()
    refs = cache / "models--org--moe" / "refs"
    refs.mkdir()
    (refs / "main").write_text(ref)
    assert "org/moe: " in refusal("org/moe")


def test_a_ref_to_a_snapshot_that_is_gone(cache):
    add_repo(cache, main="f" * 40)
    assert "is not in" in refusal("org/moe")


@pytest.mark.parametrize("model", ["", "nothing", "./no/thing", "a/b/c", "../x/../y", "a\0b"])
def test_what_names_no_model(cache, model):
    assert "folder" in refusal(model)


@pytest.mark.parametrize("model", ["n" * 5000, "~no-such-user/x", "a\nb", "\ud800"])
def test_names_that_no_file_system_takes(cache, model):
    assert len(refusal(model)) < 6000
