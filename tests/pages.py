"""HTML as tests read it: its words, whether its tags match, and what it asks for elsewhere."""

from html.parser import HTMLParser

__all__ = ["Reader", "whole"]

VOID = {"br", "img", "meta", "link"}


class Reader(HTMLParser):
    """The words of a fragment, its tags matched and its addresses."""

    def __init__(self, fragment):
        super().__init__()
        self.words, self.open, self.addresses, self.tags = "", [], [], set()
        self.feed(fragment)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words += f" {data}"


def whole(text):
    """HTML whose tags match, without scripts and addresses."""
    page = Reader(text)
    assert page.open == []
    assert "script" not in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert " at 0x" not in page.words
    return page
