# Where files that are made once are kept, and that one process makes them.

from threading import Thread

from servanda.engines.cache import alone, cache_folder


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path / "own"))
    assert cache_folder("onnx") == tmp_path / "own" / "onnx"
    monkeypatch.delenv("SERVANDA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("gguf") == tmp_path / "xdg" / "servanda" / "gguf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("gguf") == tmp_path / ".cache" / "servanda" / "gguf"


def test_what_one_makes_the_next_finds(tmp_path):
    place, made = tmp_path / "new" / "file", []

    def make():
        with alone(place):
            if not place.exists():
                made.append(1)
                place.write_text("whole")

    threads = [Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert made == [1] and place.read_text() == "whole"
