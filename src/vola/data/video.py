"""Frames of a video by number, exactly, in any order; and encoding. All through PyAV (AV1, h264, hevc, ...)."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from vola.errors import ConfigError, DataError

# A key frame every 2 frames, as LeRobot does, makes random access cheap; without B-frames the file can be cut and
# joined between any two episodes.
ENCODERS: dict[str, dict[str, str]] = {
    "libx264": {"crf": "20", "preset": "veryfast", "g": "2", "bf": "0", "threads": "1"},
    "libx265": {"crf": "22", "preset": "veryfast", "x265-params": "keyint=2:bframes=0:log-level=none:pools=1"},
    "libsvtav1": {"crf": "30", "preset": "12", "g": "2"},
    "libaom-av1": {"crf": "30", "cpu-used": "8", "g": "2", "threads": "1"},
}
CODECS = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1"}


class VideoReader:
    """Random access to one video. Frame n is the n-th in order of presentation, whatever the file's rates say.

    The packet table is read once, so a seek always lands on the right key frame and the frame that comes back is
    the one with the wanted time stamp; a stale neighbour cannot be taken for it. Not to be shared between threads.

    Raises:
        DataError: the file is missing, is no video, or its packets carry no times.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._container: Any = av.open(str(path))
            self._stream: Any = self._container.streams.video[0]
            packets: list[tuple[Any, bool]] = [
                (p.pts, p.is_keyframe) for p in self._container.demux(self._stream) if p.size and not p.is_discard
            ]
        except FileNotFoundError:
            raise DataError(f"{path}: expected this video, found none. Fetch the dataset again, completely.") from None
        except (av.FFmpegError, IndexError) as error:
            raise DataError(f"{path}: expected a readable video, got an error ({error}). Copy it again.") from error
        if not packets or any(pts is None for pts, _ in packets):
            raise DataError(f"{path}: expected packets with times. Remux the file into an mp4 first.")
        self._times: list[int] = sorted(pts for pts, _ in packets)
        self._keys: list[int] = sorted(pts for pts, key in packets if key)
        self._number = {pts: n for n, pts in enumerate(self._times)}
        self._stream.codec_context.thread_count = 1
        self._reformatter = VideoReformatter()
        self._decoder: Any = None
        self._next = 0  # number of the frame that the decoder is expected to give next

    def __len__(self) -> int:
        return len(self._times)

    def seconds(self, number: int) -> float:
        """Presentation time of a frame, from the first frame on."""
        return float((self._times[number] - self._times[0]) * self._stream.time_base)

    def frames(self, numbers: Sequence[int]) -> np.ndarray:
        """uint8 ``N 3 Y X`` in the order asked for (repeats allowed); in memory a view of ``N Y X 3``.

        Raises:
            DataError: a number outside the file, or a frame that does not decode.
        """
        wanted, place = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        if wanted.size and not 0 <= wanted[0] <= wanted[-1] < len(self):
            raise DataError(f"{self.path}: expected frames 0..{len(self) - 1}, got {wanted[0]}..{wanted[-1]}")
        out: np.ndarray | None = None
        for i, n in enumerate(wanted.tolist()):
            picture = self._decode(n)
            if out is None:
                out = np.empty((len(place), *picture.shape), np.uint8)
            out[place == i] = picture
        if out is None:
            out = np.empty((0, self._stream.height, self._stream.width, 3), np.uint8)
        # A view: whoever resizes or encodes wants the channels last, and copying 640x480 costs as much as decoding.
        return out.transpose(0, 3, 1, 2)

    def close(self) -> None:
        """Release the file."""
        self._container.close()

    def _decode(self, number: int) -> np.ndarray:
        key = self._keys[max(0, bisect_right(self._keys, self._times[number]) - 1)]
        # Going on is cheaper than seeking as long as no key frame lies between.
        if self._decoder is None or number < self._next or self._number[key] > self._next:
            self._container.seek(key, stream=self._stream, backward=True, any_frame=False)
            self._decoder = self._container.decode(self._stream)
        try:
            for frame in self._decoder:
                found = self._number.get(frame.pts, -1)
                if found == number:
                    self._next = number + 1
                    return self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                if found > number:
                    break
        except av.FFmpegError as error:
            self._decoder = None
            raise DataError(f"{self.path}: frame {number} does not decode ({error}). Copy the video again.") from error
        self._decoder = None
        raise DataError(f"{self.path}: frame {number} is listed in the file but was not decoded. Re-encode the video.")


class VideoPool:
    """At most ``size`` open readers, opened on first use, and again in a process that was forked off."""

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self._process = os.getpid()
        self._open: OrderedDict[Path, VideoReader] = OrderedDict()

    def get(self, path: Path) -> VideoReader:
        """The reader of ``path``; raises DataError as ``VideoReader`` does."""
        if self._process != os.getpid():
            # Decoder threads do not survive a fork; dropping without closing leaves the parent's file alone.
            self._process, self._open = os.getpid(), OrderedDict()
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        reader = VideoReader(path)
        self._open[path] = reader
        if len(self._open) > self._size:
            self._open.popitem(last=False)[1].close()
        return reader

    def __getstate__(self) -> dict[str, Any]:
        return {"_size": self._size, "_process": os.getpid(), "_open": OrderedDict()}


def find_encoder(codec: str, height: int, width: int) -> str:
    """The encoder that writes ``codec`` ("h264", "hevc", "av1", or an encoder's own name such as "libsvtav1").

    Raises:
        ConfigError: an unknown codec, one this build of PyAV lacks, or an odd size (yuv420p halves both sides).
    """
    encoder = CODECS.get(codec, codec)
    if encoder not in ENCODERS:
        raise ConfigError(f"codec: expected one of {sorted({*CODECS, *ENCODERS})}, got {codec!r}")
    if encoder not in av.codecs_available:
        there = sorted(e for e in ENCODERS if e in av.codecs_available)
        raise ConfigError(f"codec {codec}: this build of PyAV has no {encoder}; it has {there}")
    if height % 2 or width % 2:
        raise ConfigError(
            f"video: expected even image sides for yuv420p, got {height}x{width}. Resize, or write images."
        )
    return encoder


def rate_of(fps: float) -> Fraction:
    """fps as the ratio a video stores: 30 -> 30/1, 29.97 -> 2997/100, 30000/1001 stays."""
    return Fraction(fps).limit_denominator(1001)


def encode_video(path: Path, images: Iterable[np.ndarray], fps: float, encoder: str) -> None:
    """Write uint8 images ``Y X 3`` as one mp4, yuv420p, one frame per image at exactly ``fps``."""
    options = dict(ENCODERS[encoder])
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = None
        for number, image in enumerate(images):
            if stream is None:
                stream = container.add_stream(encoder, rate=rate_of(fps), options=options)
                stream.height, stream.width, stream.pix_fmt = image.shape[0], image.shape[1], "yuv420p"
                stream.codec_context.time_base = 1 / rate_of(fps)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate_of(fps)
            for packet in stream.encode(frame):
                container.mux(packet)
        if stream is not None:
            for packet in stream.encode(None):
                container.mux(packet)


def join_videos(path: Path, parts: Sequence[tuple[Path, int]], fps: float) -> None:
    """Copy the packets of ``parts`` (file, number of frames), all of one encoder, behind each other into one mp4."""
    with av.open(str(path), "w", format="mp4") as out:
        target: Any = None
        before = 0
        for part, length in parts:
            with av.open(str(part)) as source:
                stream = source.streams.video[0]
                if target is None:
                    target = out.add_stream_from_template(stream)
                assert stream.time_base is not None
                ticks = 1 / (rate_of(fps) * stream.time_base)
                shift = before * ticks
                assert shift.denominator == 1, f"{part}: {fps} fps does not fit the time base {stream.time_base}"
                for packet in source.demux(stream):
                    if packet.size:
                        assert packet.pts is not None
                        assert packet.dts is not None
                        packet.pts, packet.dts = packet.pts + int(shift), packet.dts + int(shift)
                        packet.stream = target
                        out.mux(packet)
            before += length
