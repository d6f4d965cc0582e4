"""What a person should hear, and once is enough: that something was had only in part.

Owns: what this process has said already. The caller keeps the sentence too (`notes`), for whoever asks later.
"""

import logging

_said: set[tuple[str, str]] = set()


def say_once(log: logging.Logger, subject: str, topic: str, text: str) -> None:
    """Warn, unless this process warned of the topic at this subject (a tier's name, a path) before.

    A store that is opened again, or one more tier of the same name, has nothing new to say.
    """
    if (subject, topic) not in _said:
        _said.add((subject, topic))
        log.warning("%s: %s", subject, text)
