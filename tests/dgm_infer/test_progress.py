"""The progress bar: what it is told, and when it says so."""

from dgm_infer.progress import Progress


def test_the_words_come_from_all_news_since_the_bar_was_last_drawn(capfd):
    seen = []

    def describe(news):
        seen.append(list(news))
        return f"latest {news[-1]}"

    with Progress(True, describe, 5) as bar:
        # drawn at the first transition; the rest falls within the interval, until the end
        bar.bar.mininterval = 1e9
        for i in range(5):
            bar.update("counting", i)
    assert [i for news in seen for i in news] == list(range(5))
    assert all(seen)
    err = capfd.readouterr().err
    assert "counting" in err
    assert "latest 4" in err


def test_announced_transitions_and_words_before_the_first_one_are_shown(capfd):
    with Progress(True) as bar:
        bar.say("start-up")
        bar.expect(3)
        bar.expect(4)
    err = capfd.readouterr().err
    assert "start-up" in err
    assert "/7" in err


def test_a_hidden_bar_computes_and_writes_nothing(capfd):
    def describe(news):
        raise AssertionError("nobody sees it")

    with Progress(False, describe, 2) as bar:
        bar.say("start-up")
        bar.update("counting", 1)
        bar.finish()
    assert capfd.readouterr() == ("", "")
