"""Messages."""


def content_text(content):
    return content
