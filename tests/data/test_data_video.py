"""Frame n is frame n: in any order, with B-frames, at any rate, across joined files, in a forked process."""

import multiprocessing as mp
import pickle
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vola.data.video import VideoPool, VideoReader, encode_video, find_encoder, join_videos, rate_of
from vola.errors import ConfigError, DataError

SIDE = 32


def counter(n: int, first: int = 0) -> np.ndarray:
    """n images ``SIDE SIDE 3`` that show their number as 12 black or white blocks: survives any codec."""
    number = first + np.arange(n)
    bits = (number[:, None] >> np.arange(12)) & 1
    blocks = np.zeros((n, 4, 4), np.uint8)
    blocks.reshape(n, 16)[:, :12] = bits * 255
    return np.repeat(np.repeat(np.repeat(blocks[..., None], 3, -1), 8, 1), 8, 2)


def read(images: np.ndarray) -> np.ndarray:
    """The numbers shown by ``N 3 Y X``."""
    blocks = images[:, 0].reshape(-1, 4, 8, 4, 8).mean((2, 4)).reshape(-1, 16)[:, :12] > 127
    return (blocks << np.arange(12)).sum(1)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> dict[str, Path]:
    """161 frames: key frame every 3; and B-frames with one key frame every 40."""
    folder = tmp_path_factory.mktemp("clips")
    out = {}
    for name, options in {"gop3": {"g": "3", "bf": "0"}, "b-frames": {"g": "40", "bf": "3"}}.items():
        out[name] = folder / f"{name}.mp4"
        with av.open(str(out[name]), "w") as container:
            stream = container.add_stream("libx264", rate=30, options={**options, "threads": "1"})
            stream.width = stream.height = SIDE
            stream.pix_fmt = "yuv420p"
            for image in counter(161):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode(None))
    return out


@pytest.mark.parametrize("name", ["gop3", "b-frames"])
def test_D18_random_access_equals_sequential_decoding(clips, name) -> None:
    with av.open(str(clips[name])) as container:
        pictures = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        kinds = {p.pict_type for p in av.open(str(clips[name])).decode(video=0)}
    assert len(kinds) == (3 if name == "b-frames" else 2)
    reader = VideoReader(clips[name])
    assert len(reader) == len(pictures) == 161
    for visit in ([159, 35, 0, 160, 80], [160], [3, 3, 1, 2], [0]):
        got = reader.frames(visit)
        assert read(got).tolist() == visit
        np.testing.assert_array_equal(got.transpose(0, 2, 3, 1), np.stack([pictures[i] for i in visit]))
        assert reader.seconds(visit[0]) == visit[0] / 30


@settings(max_examples=25, deadline=None)
@given(visits=st.lists(st.lists(st.integers(0, 160), min_size=1, max_size=6), min_size=1, max_size=4))
def test_D18_any_order_of_visits(clips, visits) -> None:
    reader = VideoReader(clips["b-frames"])
    for visit in visits:
        assert read(reader.frames(visit)).tolist() == visit


@pytest.mark.parametrize("fps", [30, 29.97, 30000 / 1001, 12.5, 10])
def test_joined_clips_keep_every_frame_at_its_time(tmp_path, fps) -> None:
    lengths = [3, 1, 7, 2]
    parts = []
    for i, n in enumerate(lengths):
        encode_video(tmp_path / f"{i}.mp4", counter(n, sum(lengths[:i])), fps, "libx264")
        parts.append((tmp_path / f"{i}.mp4", n))
    join_videos(tmp_path / "all.mp4", parts, fps)
    reader = VideoReader(tmp_path / "all.mp4")
    assert read(reader.frames(range(13))).tolist() == list(range(13))
    np.testing.assert_allclose([reader.seconds(i) for i in range(13)], np.arange(13) / fps, atol=1e-6)


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_every_codec_comes_back(tmp_path, codec) -> None:
    try:
        encoder = find_encoder(codec, 64, 64)
    except ConfigError as error:
        pytest.skip(str(error))
    images = np.kron(counter(9), np.ones((1, 2, 2, 1), np.uint8))
    encode_video(tmp_path / "v.mp4", images, 10, encoder)
    got = VideoReader(tmp_path / "v.mp4").frames(range(9))
    assert read(got[:, :, ::2, ::2]).tolist() == list(range(9))
    assert np.abs(got.transpose(0, 2, 3, 1).astype(int) - images).mean() < 6


def test_rates_are_ratios() -> None:
    assert [rate_of(f) for f in (30, 29.97, 30000 / 1001, 12.5)] == [
        30,
        Fraction(2997, 100),
        Fraction(30000, 1001),
        12.5,
    ]


def in_child(pool: VideoPool, path: Path, parents: VideoReader, queue: mp.Queue) -> None:
    # A reader that came over the fork shares its file position with the parent.
    assert pool.get(path) is not parents
    queue.put(read(pool.get(path).frames([100, 5])).tolist())


def test_a_pool_works_after_fork_and_after_pickling(clips) -> None:
    pool = VideoPool(size=1)
    assert read(pool.get(clips["gop3"]).frames([7])).tolist() == [7]
    queue = mp.get_context("fork").Queue()
    child = mp.get_context("fork").Process(target=in_child, args=(pool, clips["gop3"], pool.get(clips["gop3"]), queue))
    child.start()
    assert queue.get(timeout=30) == [100, 5]
    child.join(timeout=30)
    assert child.exitcode == 0
    assert read(pool.get(clips["gop3"]).frames([8])).tolist() == [8]
    assert read(pickle.loads(pickle.dumps(pool)).get(clips["b-frames"]).frames([9])).tolist() == [9]
    pool.get(clips["b-frames"])
    assert read(pool.get(clips["gop3"]).frames([10])).tolist() == [10]


def test_faults_name_the_file(tmp_path, clips) -> None:
    with pytest.raises(DataError, match=r"gone\.mp4: expected this video, found none"):
        VideoReader(tmp_path / "gone.mp4")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(DataError, match=r"text\.mp4: expected a readable video"):
        VideoReader(tmp_path / "text.mp4")
    whole = clips["gop3"].read_bytes()
    (tmp_path / "short.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"short\.mp4"):
        VideoReader(tmp_path / "short.mp4").frames(range(161))
    with pytest.raises(DataError, match=r"frames 0\.\.160, got 161"):
        VideoReader(clips["gop3"]).frames([161])


def test_encoders_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="even image sides"):
        find_encoder("h264", 33, 32)
    with pytest.raises(ConfigError, match="'mpeg7'"):
        find_encoder("mpeg7", 32, 32)
