"""Reading safetensors: what is there is read to the bit, and whatever is wrong with a file is said."""

import json
import pickle
import re
import time

import pytest
import torch
from checkpoints import checkpoint, save, save_sharded
from helpers import bits

from h3mlp.checkpoint.container import DTYPES, open_checkpoint, prefetched


def raw(path, header: object, data: bytes = b"", length: int | None = None):
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), span=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.safetensors"


class TestReading:
    def test_every_dtype_whole_and_by_rows(self, file):
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(0, 2, (7, 3, 8), dtype=torch.uint8, generator=generator)
        tensors = {name: numbers.to(dtype) for name, dtype in DTYPES.items()}
        tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(3.0)}
        container = open_checkpoint(save(tensors, file, origin="test"))
        assert container.metadata == {"origin": "test"}
        assert container.tensors.keys() == tensors.keys()
        assert container.nbytes == sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            stored = container.tensors[name]
            assert (stored.read().dtype, stored.read().shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(
                bits(stored.read()) if tensor.dim() else stored.read(), bits(tensor) if tensor.dim() else tensor
            )
            if tensor.numel() > 1:
                assert torch.equal(bits(stored.read(2, 4)), bits(tensor[2:6]))

    def test_a_dtype_that_is_only_copied(self, file):
        raw(file, {"w": entry("F4", (4,), (0, 2))}, b"ab")
        assert bytes(open_checkpoint(file).tensors["w"].read_bytes(0, 2)) == b"ab"

    @pytest.mark.parametrize("given", ["", "model.safetensors.index.json"])
    def test_several_files(self, tmp_path, given):
        tensors = checkpoint()
        folder = save_sharded(tensors, tmp_path / "folder")
        container = open_checkpoint(folder / given)
        assert len(container.files) == 3
        assert all(torch.equal(container.tensors[name].read(), tensor) for name, tensor in tensors.items())

    def test_several_files_without_an_index(self, tmp_path):
        folder = save_sharded(checkpoint(), tmp_path / "folder")
        (folder / "model.safetensors.index.json").unlink()
        assert open_checkpoint(folder).tensors.keys() == checkpoint().keys()

    def test_spaces_behind_the_header(self, file):
        raw(file, json.dumps({"w": entry()}).encode() + b"  ", bytes(8))
        assert open_checkpoint(file).tensors["w"].read().tolist() == [0, 0]


class TestRefusals:
    def refused(self, path, message):
        with pytest.raises(ValueError, match=message):
            open_checkpoint(path)

    @pytest.mark.parametrize("kept", [0, 5, 100, -1])
    def test_cut_off(self, file, kept):
        save(checkpoint(), file)
        content = file.read_bytes()
        file.write_bytes(content[: kept if kept >= 0 else len(content) - 1])
        self.refused(file, "is cut off|cut off or something else")

    def test_cut_off_while_it_is_read(self, file):
        container = open_checkpoint(save({"w": torch.zeros(8)}, file))
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(ValueError, match="ended while w was read"):
            container.tensors["w"].read()

    def test_more_than_its_tensors(self, file):
        save({"w": torch.zeros(8)}, file)
        file.write_bytes(file.read_bytes() + b"x")
        self.refused(file, "has something behind its tensors")

    def test_every_flipped_bit_of_a_header(self, file):
        """Is refused, or changes a name, a dtype of the same size, a shape of the same product or a metadatum; what is
        read stays within the file in any case."""
        raw(file, {"ab": entry(shape=(2, 1)), "c": entry("BF16", (3,), (8, 14))}, bytes(14))
        content = bytearray(file.read_bytes())
        header_end = 8 + int.from_bytes(content[:8], "little")
        refused = 0
        for bit in range(8 * header_end):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                container = open_checkpoint(file)
            except ValueError:
                refused += 1
                continue
            assert sum(len(stored.read_bytes(0, stored.nbytes)) for stored in container.tensors.values()) == 14
        assert refused > 8 * header_end * 0.8

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (b"{", "damaged header"),
            (b"[]", "damaged header"),
            (b"\xff\xfe", "damaged header"),
            ({"w": {}}, "damaged header"),
            ({"w": 3}, "damaged header"),
            ({"w": entry(shape=(3,))}, "cannot take 8 bytes"),
            ({"w": entry(shape=(-2,))}, "cannot take 8 bytes"),
            ({"w": entry(shape=(2.0,))}, "cannot take 8 bytes"),
            ({"w": entry(span=(0, -8))}, "cannot take -8 bytes"),
            ({"w": entry(span=(4, 12))}, "does not begin where"),
            ({"w": entry(), "v": entry()}, "does not begin where"),
            (b'{"w": %b, "w": %b}' % (json.dumps(entry()).encode(), json.dumps(entry()).encode()), "duplicate key 'w'"),
        ],
    )
    def test_a_damaged_header(self, file, header, message):
        self.refused(raw(file, header, bytes(8)), message)

    def test_a_name_in_two_files(self, tmp_path):
        for name in ("a", "b"):
            save({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
        self.refused(tmp_path, re.escape(f"w must be in one file; it is in {tmp_path}/a.safetensors and in"))

    def test_a_shard_that_is_missing(self, tmp_path):
        folder = save_sharded(checkpoint(), tmp_path / "folder")
        (folder / "model-00002-of-00003.safetensors").unlink()
        self.refused(folder, "names 3 files; missing: model-00002-of-00003.safetensors")
        (folder / "model.safetensors.index.json").unlink()
        self.refused(folder, "must have all 3 files of its set .*; model-00002-of-00003.safetensors is missing")
        self.refused(folder / "model-00001-of-00003.safetensors", "must have all 3 files of its set")

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ("{", "must be the index of a checkpoint"),
            ("[]", "must be the index of a checkpoint"),
            ('{"weight_map": 3}', "must be the index of a checkpoint"),
            ('{"weight_map": {"w": 3}}', "must be the index of a checkpoint"),
            ('{"weight_map": {"w": "../x.safetensors"}}', "must name files beside it"),
            ('{"weight_map": {"w": "x.safetensors", "w": "x.safetensors"}}', "duplicate key 'w'"),
            ('{"weight_map": {"v": "x.safetensors"}}', "v must be in x.safetensors, as the index"),
        ],
    )
    def test_a_wrong_index(self, file, index, message):
        save({"w": torch.zeros(2)}, file)
        file.with_name("model.safetensors.index.json").write_text(index)
        self.refused(file.parent, message)

    def test_nothing_is_unpickled(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return (pytest.fail, ("unpickled",))

        for name in ("model.ckpt", "model.pt", "model.safetensors"):
            (tmp_path / name).write_bytes(pickle.dumps({"w": Bomb()}))
            self.refused(tmp_path / name, "pickles are never read|must be a safetensors file")

    def test_other_things(self, tmp_path):
        (tmp_path / "transformer").mkdir()
        self.refused(tmp_path, "must hold safetensors files; it holds none$")
        save({"w": torch.zeros(2)}, tmp_path / "transformer/model.safetensors")
        self.refused(tmp_path, "it holds none; give one of its folders transformer")
        (tmp_path / "lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        self.refused(tmp_path / "lfs.safetensors", "a Git LFS pointer: run git lfs pull")
        for name in ("a", "b"):
            (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
        self.refused(tmp_path, "must have one index")
        with pytest.raises(FileNotFoundError):
            open_checkpoint(tmp_path / "none.safetensors")


class TestPrefetched:
    def test_in_order_and_one_ahead(self):
        made = []

        def call(i):
            return lambda: made.append(i) or i

        results = prefetched(map(call, range(5)))
        assert next(results) == 0
        deadline = time.monotonic() + 10
        while made != [0, 1] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert made == [0, 1]
        assert list(results) == [1, 2, 3, 4]

    def test_an_error_comes_where_its_result_would(self):
        def fails():
            raise OSError("gone")

        results = prefetched([lambda: 1, fails, lambda: 3])
        assert next(results) == 1
        with pytest.raises(OSError, match="gone"):
            next(results)
