"""A picture as it passes between processes: the path of its file, never its pixels.

Pictures are untrusted: only local files of a known raster format and bounded size are opened; nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from verl import envs

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MOST_PIXELS = 2**26
"""8,192 x 8,192; below what PIL itself warns of."""
MOST_NBYTES = 2**28
"""The most bytes of a file."""
WORDS = ("bytes", "path", "image", "image_url")
"""Fields of a dict with the location of a picture; the first one that is not null counts."""


class PictureError(ValueError):
    """An unusable picture; the message has the reason. The caller adds file, row and number."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a local file, which must be visible to every process that opens it."""

    path: str
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""

    def open(self) -> Image.Image:
        """The pixels, RGB. Raises PictureError for a file that has changed, is damaged, too large or of another
        format."""
        data = _bytes_of(Path(self.path))
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise PictureError(f"{self.path} is no longer what it was when the data were read")
        return _decoded(data)


def keep(given: Any) -> Picture:
    """`given` as data sets have it: encoded bytes, a PIL image, a path, a `file:` or `data:` URL, or a dict with one of
    them under one of `WORDS`. Bytes without a file are written to one in `verl.envs.cache_dir()`, under their digest.

    Does not decode the pixels. Raises PictureError for anything else, including URLs of other machines.
    """
    if isinstance(given, Picture):
        return given
    if isinstance(given, Mapping):
        if asked := sorted(key for key, value in given.items() if value is not None and key not in (*WORDS, "type")):
            raise PictureError(f"has {', '.join(map(str, asked))}, and only {', '.join(WORDS)} are known")
        given = next((given[word] for word in WORDS if given.get(word) is not None), None)
        if isinstance(given, Mapping):  # {"image_url": {"url": ...}}
            given = given.get("url")
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _stored(bytes(given))
    if isinstance(given, (str, Path)) and str(given):
        return _named(str(given))
    if hasattr(given, "save") and hasattr(given, "getbands"):
        written = io.BytesIO()
        given.save(written, format="PNG")
        return _stored(written.getvalue())
    raise PictureError(f"is {type(given).__name__}, neither bytes, path, data URL nor PIL image")


def _named(name: str) -> Picture:
    scheme = urlsplit(name).scheme.lower() if ":" in name else ""
    if scheme == "data":
        header, _, data = name.partition(",")
        if not header.endswith(";base64"):
            raise PictureError("is a data URL without ';base64'")
        try:
            return _stored(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError) as exc:
            raise PictureError(f"is a data URL whose base64 is damaged: {exc}") from exc
    if scheme == "file":
        name = unquote(urlsplit(name).path)
    elif "://" in name:
        raise PictureError(f"is at {name[:80]!r}, and nothing is fetched: give the file")
    path = Path(name).expanduser().absolute()
    return Picture(str(path), hashlib.sha256(_bytes_of(path)).hexdigest())


def _bytes_of(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise PictureError(f"is at {path}, where there is no file")
        if path.stat().st_size > MOST_NBYTES:
            raise PictureError(f"has {path.stat().st_size} bytes ({path}), more than {MOST_NBYTES}")
        return path.read_bytes()
    except OSError as exc:
        raise PictureError(f"cannot be read: {exc}") from exc


def _stored(data: bytes) -> Picture:
    if len(data) > MOST_NBYTES:
        raise PictureError(f"has {len(data)} bytes, more than {MOST_NBYTES}")
    digest = hashlib.sha256(data).hexdigest()
    path = envs.cache_dir().expanduser().absolute() / "pictures" / digest[:2] / digest
    try:
        if not path.is_file() or path.stat().st_size != len(data):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{digest}.{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as exc:
        raise PictureError(f"cannot be kept in {path.parent} ({exc}): set VERL_CACHE_DIR to a writable place") from exc
    return Picture(str(path), digest)


def _decoded(data: bytes) -> Image.Image:
    from PIL import Image

    size = (0, 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                size = image.size
                if size[0] * size[1] <= MOST_PIXELS:
                    image.load()
                    return _opaque(image)
    except Image.DecompressionBombError as exc:
        raise PictureError(f"has more than {MOST_PIXELS} pixels: {exc}") from exc
    except Exception as exc:  # decoders raise what they like
        raise PictureError(f"is damaged, or none of {', '.join(FORMATS)} ({type(exc).__name__}: {exc})") from exc
    raise PictureError(f"has {size[0]} x {size[1]} pixels, more than {MOST_PIXELS}")


def _opaque(image: Image.Image) -> Image.Image:
    """RGB, on white where it is transparent."""
    from PIL import Image

    if image.mode == "RGB":
        return image.copy()
    if image.has_transparency_data:
        own = image.convert("RGBA")
        white = Image.new("RGB", own.size, "white")
        white.paste(own, mask=own.getchannel("A"))
        return white
    return image.convert("RGB")
