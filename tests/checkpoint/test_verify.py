"""Every silent mistake, made for real, is found and named; what is right passes."""

import json

import checkpoints
import pytest
import torch
from checkpoints import FORMS, REPACKED, checkpoint, converted, save
from helpers import bits
from safetensors import safe_open
from safetensors.torch import load_file

import h3mlp
from h3mlp.checkpoint import verify
from h3mlp.tools.checkpoint_views import verdict, verified_table

LAYER = "blocks.1.fc1_swiglu"


@pytest.fixture
def folder(tmp_path):
    converted(checkpoint("diffusers"), tmp_path)
    return tmp_path


def spoiled(folder, change):
    """The prepared file with one layer's tensors changed, checksums included: as a wrong converter would write it."""
    import zlib

    path = folder / "prepared.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    content = json.loads(metadata["h3mlp"])
    for layer, of_layer in content["layers"].items():
        for which in of_layer["crc32"]:
            data = bits(tensors[f"{layer}.fc1_swiglu.{which}"]).contiguous()
            of_layer["crc32"][which] = zlib.crc32(data.view(torch.uint8).numpy().tobytes())
    return save(tensors, folder / "spoiled.safetensors", **metadata | {"h3mlp": json.dumps(content)})


def faults(folder, change, layer="blocks.1"):
    """Of the layer; all others are right."""
    verified = verify.run(spoiled(folder, change), folder / "source.safetensors", rows=32)
    assert not verified.ok
    found = {check.layer: check for check in verified.checks if check.faults}
    assert list(found) == [layer]
    assert f"FAILED: 1 of {len(verified.checks)} layers are off" in list(verdict(verified))
    return found[layer]


def repack(tensors, change_codes=lambda rows: rows, change_scales=lambda rows: rows):
    """The layer with its rows changed in the order of the halves."""
    for name, change in ((f"{LAYER}.weight", change_codes), (f"{LAYER}.weight_scale", change_scales)):
        rows = change(h3mlp.unpack_fc1_rows(tensors[name]).clone())
        tensors[name] = h3mlp.pack_fc1_rows(rows.clone())


def exchange(rows):
    gate, up = rows.chunk(2)
    return torch.cat([up, gate])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("naming", ["native", "diffusers"])
def test_what_is_right(tmp_path, naming, form):
    """Repacked weights are exact. E4M3 of normally distributed numbers is 31.5 dB from them, of 65,536 within 0.5 dB;
    the two mantissa bits of E5M2 fit into E4M3's three, exactly where the scales differ by a power of two."""
    path = converted(checkpoint(naming, form), tmp_path)
    verified = verify.run(path, tmp_path / "source.safetensors")
    assert verified.ok, verified
    assert [check.form for check in verified.checks] == [form] * 3
    for check in verified.checks:
        assert check.output_db > 24
        assert abs(check.exchanged_db) < 6
        if form in REPACKED:
            assert check.snr_db == check.worst_row_db == torch.inf
        else:
            assert 24.5 <= check.worst_row_db <= check.snr_db
            assert check.snr_db >= 31
            assert check.snr_db <= 32 or form.startswith("E5M2")
    verified_table(verified)


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ("E4M3 per tensor", "BF16"),
        ("BF16", "E4M3 per tensor"),
        ("BF16", "E5M2 per tensor"),
        ("E5M2 per tensor", "FP32"),
        ("E5M2 per channel", "E4M3 per channel"),
    ],
)
def test_against_another_form_of_the_same_weights(tmp_path, form, other):
    """What was made of FP8 against BF16, and the reverse: neither is exact. E5M2, with a bit less, is further off."""
    path = converted(checkpoint("native", form), tmp_path)
    verified = verify.run(path, save(checkpoint("diffusers", other), tmp_path / "other.safetensors"))
    assert verified.ok, verified
    assert all(check.snr_db < torch.inf for check in verified.checks)


class TestMistakes:
    def test_halves_exchanged(self, folder):
        check = faults(folder, lambda tensors: repack(tensors, exchange, exchange))
        assert check.faults[0] == "its halves are exchanged: gate and up are the other way round"
        assert check.exchanged_db > 30
        assert check.exchanged_output_db > 24 > 6 > check.output_db

    def test_a_gate_order_that_is_wrong(self, tmp_path):
        path = converted(checkpoint("diffusers"), tmp_path, gate_order="gate_up")
        verified = verify.run(path, tmp_path / "source.safetensors")
        assert all("its halves are exchanged" in check.faults[0] for check in verified.checks)
        assert verify.run(path, tmp_path / "source.safetensors", gate_order="gate_up").ok

    @pytest.mark.parametrize("order", [exchange, lambda rows: rows.flip(0), lambda rows: rows.roll(1, 0)])
    def test_scales_that_were_not_reordered(self, folder, order):
        """Scales of rows of this size differ by 10%: the SNR falls to 20 dB, the output may pass."""
        check = faults(folder, lambda tensors: repack(tensors, change_scales=order))
        assert check.faults[0] == "its scales are not those of their rows: the codes are right"

    def test_scales_that_were_not_packed(self, folder):
        def change(tensors):
            tensors[f"{LAYER}.weight_scale"] = h3mlp.unpack_fc1_rows(tensors[f"{LAYER}.weight_scale"]).clone()

        assert "scales are not those of their rows" in faults(folder, change).faults[0]

    @pytest.mark.parametrize(("order", "name"), [(lambda rows: rows, "gate_up"), (exchange, "up_gate")])
    def test_rows_that_were_not_packed(self, folder, order, name):
        def change(tensors):
            for which in ("weight", "weight_scale"):
                tensors[f"{LAYER}.{which}"] = order(h3mlp.unpack_fc1_rows(tensors[f"{LAYER}.{which}"])).clone()

        check = faults(folder, change)
        assert check.faults[0] == f"its rows are not packed: they are in order {name}"
        assert check.output_db < 6

    def test_another_layer(self, folder):
        def change(tensors):
            for which in ("weight", "weight_scale"):
                tensors[f"{LAYER}.{which}"] = tensors[f"blocks.0.fc1_swiglu.{which}"].clone()

        assert faults(folder, change).faults[0] == "it is another weight: no order of the halves fits"

    @pytest.mark.parametrize(("half", "row"), [(0, 0), (0, 127), (1, 0), (1, 127)])
    def test_one_row(self, folder, half, row):
        """Named as the source has it: up first."""

        def change(tensors):
            def negate(rows):
                rows.view(torch.uint8)[half * 128 + row] ^= 0x80
                return rows

            repack(tensors, change_codes=negate)

        check = faults(folder, change)
        name = "transformer_blocks.1.ff.net.0.proj.weight"
        of_source = row + 128 * (1 - half)
        assert check.faults[0] == f"1 of its rows are off, the first is row {of_source} of {name}"
        assert check.worst_row == of_source
        assert check.worst_row_db < 0

    def test_the_norm_weight(self, folder):
        def change(tensors):
            tensors[f"{LAYER}.norm_weight"] = tensors[f"{LAYER}.norm_weight"] + 1

        assert faults(folder, change).faults[0] == "its norm weight is another"

    def test_a_nan(self, folder):
        def change(tensors):
            tensors[f"{LAYER}.weight"].view(torch.uint8)[3, 3] = 0x7F

        assert "1 of its rows are off" in faults(folder, change).faults[0]

    def test_a_code_of_a_repacked_weight(self, tmp_path):
        """One code by one step: far above any threshold but not exact."""
        converted(checkpoint("native", "E4M3 per channel"), tmp_path)

        def change(tensors):
            tensors[f"{LAYER}.weight"].view(torch.uint8)[200, 7] ^= 1

        assert "1 of its rows are off" in faults(tmp_path, change).faults[0]

    @pytest.mark.parametrize("which", ["weight", "weight_scale", "norm_weight"])
    def test_a_flipped_bit_on_the_disk(self, folder, which):
        """The last bit of a tensor's last byte but one: too small for any SNR, but not what was written."""
        from h3mlp.checkpoint.prepared import open_prepared

        path = folder / "prepared.safetensors"
        stored = open_prepared(path).container.tensors[f"{LAYER}.{which}"]
        content = bytearray(path.read_bytes())
        content[stored.offset + stored.nbytes - 4] ^= 1
        path.write_bytes(content)
        verified = verify.run(path, folder / "source.safetensors")
        assert not verified.ok
        (check,) = (check for check in verified.checks if check.faults)
        assert f"{LAYER}.{which} is damaged: its bytes are not those that were written" in check.faults


class TestAdapters:
    @pytest.fixture
    def lora(self, tmp_path):
        generator = torch.Generator().manual_seed(0)
        pair = {"A": torch.randn(4, 256, generator=generator), "B": torch.randn(256, 4, generator=generator)}
        content = {
            f"transformer_blocks.0.ff.net.0.proj.lora_{name}.weight": value * 0.1 for name, value in pair.items()
        }
        return save(content, tmp_path / "lora.safetensors")

    def test_merged(self, tmp_path, lora):
        path = converted(checkpoint("native", "E4M3 per channel"), tmp_path, loras=[(lora, 0.5)])
        verified = verify.run(path, tmp_path / "source.safetensors", loras=[(lora, 0.5)])
        assert verified.ok, verified
        assert [check.snr_db < torch.inf for check in verified.checks] == [True, False, False]

    @pytest.mark.parametrize("given", [[], [1.0], [0.5, 0.5]])
    def test_other_adapters_than_those_merged(self, tmp_path, lora, given):
        path = converted(checkpoint(), tmp_path, loras=[(lora, 0.5)])
        with pytest.raises(
            ValueError, match=r"--lora must be given as for .*, which has lora.safetensors merged, scale 0.5, rank"
        ):
            verify.run(path, tmp_path / "source.safetensors", loras=[(lora, scale) for scale in given])


def test_other_layers(folder):
    other = save(checkpoint(layers=3), folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"must have the same layers; only one has blocks\.2"):
        verify.run(folder / "prepared.safetensors", other)


class TestTinyRows:
    """Rows of few bits, in which a right conversion is off by as much as half a step of the smallest codes."""

    def tensors(self, form="BF16", factor=1e-15):
        tensors = checkpoint("native", "FP32")
        weight = tensors["blocks.0.mlp.fc1.weight"]
        weight[3] *= factor
        weight[200] *= factor * 1e-4
        weight[255] = 0
        for name in list(tensors):
            if name.endswith("fc1.weight"):
                start = name.removesuffix("weight")
                tensors |= {f"{start}{tail}": t for tail, t in checkpoints.stored_as(tensors[name], form).items()}
        return tensors

    @pytest.mark.parametrize("form", [form for form in FORMS if "channel" not in form])
    @pytest.mark.parametrize("factor", [1e-5, 1e-10, 1e-13, 1e-20])
    def test_right(self, tmp_path, form, factor):
        """Below the least scale, 1e-12 / 448, and below the scale of a whole tensor."""
        path = converted(self.tensors(form, factor), tmp_path)
        verified = verify.run(path, tmp_path / "source.safetensors", rows=4)
        assert verified.ok, list(verdict(verified))
        assert all(check.worst_row_db >= 24.5 for check in verified.checks)

    @pytest.mark.parametrize(
        "forms", [("BF16", "E4M3 per tensor"), ("E4M3 per tensor", "BF16"), ("FP32", "E5M2 per tensor")]
    )
    @pytest.mark.parametrize("factor", [1e-3, 1e-5, 1e-8])
    def test_right_against_another_form(self, tmp_path, forms, factor):
        """Which has its own steps."""
        of, against = forms
        path = converted(self.tensors(of, factor), tmp_path)
        other = save(self.tensors(against, factor), tmp_path / "other.safetensors")
        verified = verify.run(path, other, rows=4)
        assert verified.ok, list(verdict(verified))

    @pytest.mark.parametrize("row", [0, 3])
    def test_wrong_all_the_same(self, tmp_path, row):
        """A row that is off by a tenth, tiny (1e-8 of the others, but not beside its own scale) or not."""
        path = converted(self.tensors(factor=1e-8), tmp_path)

        def change(tensors):
            scales = h3mlp.unpack_fc1_rows(tensors["blocks.0.fc1_swiglu.weight_scale"]).clone()
            scales[row] *= 1.1
            tensors["blocks.0.fc1_swiglu.weight_scale"] = h3mlp.pack_fc1_rows(scales).clone()

        verified = verify.run(spoiled(tmp_path, change), tmp_path / "source.safetensors", rows=4)
        assert path.exists()
        assert f"first is row {row} of" in verified.checks[0].faults[0]

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_in_a_scale(self, folder, value):
        """It is a fault, and JSON all the same."""

        def change(tensors):
            tensors[f"{LAYER}.weight_scale"][5] = value

        verified = verify.run(spoiled(folder, change), folder / "source.safetensors", rows=4)
        assert not verified.ok
        json.dumps(verified.as_json(), allow_nan=False)
        list(verdict(verified))
        verified_table(verified)


def test_json_has_no_infinity(tmp_path):
    path = converted(checkpoint("native", "E4M3 per channel"), tmp_path)
    content = verify.run(path, tmp_path / "source.safetensors").as_json()
    assert content["ok"] is True
    assert content["layers"][0]["snr_db"] is None
    json.dumps(content, allow_nan=False)
