"""What the CUDA executor keeps on disk, and what it gives to MLX to launch."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_phase.executor import (
    ExecutorError,
    cuda,
    cuda_binary,
    cuda_store,
    nvrtc,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))


def test_stored_text_follows_its_content(tmp_path):
    first, again = (
        cuda_store.stored("k", "int a;\n"),
        cuda_store.stored("k", "int a;\n"),
    )
    other = cuda_store.stored("k", "int b;\n")
    assert first == again != other
    paths = [line.split('"')[1] for line in (first, other)]
    assert [open(p).read() for p in paths] == ["int a;\n", "int b;\n"]
    assert all(p.startswith(tmp_path.as_posix()) for p in paths)


def test_what_is_kept_is_made_once(tmp_path):
    made = []

    def make() -> bytes:
        made.append(None)
        return b"machine code"

    def twice() -> list[bytes]:
        return [cuda_store.kept_sealed("k.cubin", make) for _ in range(2)]

    assert twice() == [b"machine code"] * 2
    (path,) = tmp_path.rglob("*.*")
    assert len(made) == 1 and path.name == "k.cubin"
    # What a crash or a bad disk left is made again.
    sealed = path.read_bytes()
    for i, broken in enumerate((b"", sealed[:-1], b"M" + sealed[1:], sealed[:9])):
        path.write_bytes(broken)
        assert twice() == [b"machine code"] * 2 and len(made) == 2 + i


def test_text_that_was_broken_is_stored_again():
    path = cuda_store.stored("k", "int a;\n").split('"')[1]
    with open(path, "w") as file:
        file.write("int")
    cuda_store.stored("k", "int a;\n")
    assert open(path).read() == "int a;\n"


def test_nvrtc_reads_stored_text():
    header = cuda_store.stored("k", "__global__ void stored(float* o) { o[0] = 1; }\n")
    try:
        assert "stored" in nvrtc.compile_ptx(header, "k")
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))


def test_missing_nvrtc_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(nvrtc, "_roots", lambda: [])
    for find in (nvrtc.library, nvrtc.include_paths):
        with pytest.raises(nvrtc.NvrtcMissing, match="pip install nvidia-cuda-nvrtc"):
            find.__wrapped__()


def test_a_folder_that_cannot_be_written_costs_speed_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="MLX_PHASE_CACHE"):
        assert cuda_store.stored("k", "int a;\n") == "int a;\n"


class Recorder:
    """Stands where MLX's CUDA kernel is: counts builds and keeps the calls."""

    def __init__(self):
        self.built, self.calls = [], []

    def __call__(self, **build):
        self.built.append(build)
        return lambda **call: self.calls.append(call)


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(mx.fast, "cuda_kernel", made)
    monkeypatch.setattr(cuda_binary, "_compiler", lambda: None)
    return made


def launch(kernel, inputs, grid=(64, 1, 1), threadgroup=(32, 1, 1), **options):
    kernel(
        inputs=inputs,
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
        grid=grid,
        threadgroup=threadgroup,
        **options,
    )


def test_one_build_serves_calls_of_one_kind(recorder):
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x;")
    for _ in range(2):
        launch(kernel, [mx.zeros(8)], template=[("N", 2)])
        launch(kernel, [mx.array(1.0)], template=[("N", 3)])
        launch(kernel, [2.0], template=[("N", 3)])
        launch(kernel, [2.0], template=[("N", 3)], grid=[64, 1, 1])
    launch(kernel, [2.0], template=[("N", -3)])
    assert len(recorder.built) == 3
    assert len({build["name"] for build in recorder.built}) == 3
    assert len(recorder.calls) == 9
    assert recorder.built[0]["header"].startswith('#include "')


def test_overhanging_threadgroups_get_the_grid(recorder):
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    launch(kernel, [mx.zeros(8)], (50, 3, 1), (32, 2, 1))
    assert recorder.calls[0]["inputs"][1].tolist() == [50, 3, 1]
    assert recorder.built[0]["input_names"] == ["in0", "msl_extent"]
    launch(kernel, [mx.zeros(8)], (16, 2, 1), (32, 2, 1))
    assert recorder.built[1]["input_names"] == ["in0"]
    assert recorder.calls[1]["threadgroup"] == (16, 2, 1)


@pytest.fixture
def modules(monkeypatch):
    """Calls of MLX's launch of modules, which are compiled for a GPU not there."""
    calls = []

    def launch(**call):
        calls.append(call)
        return [mx.zeros(64)]

    try:
        version = nvrtc.version()
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cuda_binary, "_compiler", lambda: ("sm_90a", version))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    return calls


def test_modules_are_compiled_once_for_each_type_and_then_named(recorder, modules):
    for _ in range(2):  # the second time from disk
        kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
        for x in (mx.zeros(8), mx.zeros(8), mx.zeros(8, mx.float16)):
            launch(kernel, [x], (50, 3, 1), (32, 2, 1))
    assert not recorder.built
    sources = [call["compiled_source"] for call in modules]
    assert [call["scalars"] for call in modules] == [
        [0],
        [0],
        [1],
        [1],
        [0],
        [0],
        [1],
    ] * 2
    assert sources[0][:4] == b"\x7fELF" and modules[0]["name"].encode() in sources[0]
    assert len(modules[0]["inputs"]) == 2  # and the grid's size
    assert len(sources[1]) == 8 and [sources[1]] * 2 == sources[2:4]
    assert modules[2]["inputs"][1].tolist() == [50, 3, 1]
    names = [call["name"] for call in modules]
    assert names == [*[names[0]] * 4, *[names[4]] * 3] * 2 and names[0] != names[4]


def test_shapes_are_numbers_for_modules(modules):
    source = "y[0] = x_shape[1] + s_ndim + x_ndim + o[0];"
    kernel = cuda.metal_kernel("k", ["x", "o", "s"], ["y"], source)
    launch(kernel, [mx.zeros((4, 5)), mx.zeros((3, 3)), mx.zeros(7)])
    assert modules[0]["scalars"] == [0] * 4
    assert modules[-1]["scalars"] == [1, 4, 5, 7]
    launch(kernel, [mx.zeros((4, 5, 6)), mx.zeros(3), mx.zeros(7)])
    assert modules[-1]["scalars"] == [1, 4, 5, 6, 7]
    assert modules[-1]["name"] != modules[0]["name"]


def test_aliases_have_the_hash_of_what_they_stand_for():
    # Values of GCC's std::hash<std::string>.
    known = {0: 0x553E93901E462A6E, 1: 0x6D09EE26D5863619, 7: 0x3A0BD73605B9F99D}
    known |= {8: 0x8358BF4FEE099960, 9: 0x887A6298092D5DFC, 4099: 0x20E9977FA6001C2A}
    for size, value in known.items():
        data = bytes(i * i % 251 for i in range(size))
        assert cuda_binary._hash(data) == value
        alias = cuda_binary._alias(data)
        assert len(alias) == 8 and cuda_binary._hash(alias) == cuda_binary._hash(data)


@pytest.mark.parametrize("error", [RuntimeError("no image"), TypeError("arguments")])
def test_mlx_compiles_what_it_cannot_launch(recorder, modules, monkeypatch, error):
    def launched(compiled_source, **_):
        if len(compiled_source) == 8:
            raise error
        return [mx.zeros(64)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launched)
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    for _ in range(2):
        launch(kernel, [mx.zeros(8)])
    assert len(recorder.calls) == 2 and len(recorder.built) == 1


def test_types_that_metal_lacks_are_left_to_mlx(recorder, modules):
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    launch(kernel, [mx.zeros(8, mx.float64, stream=mx.cpu)])
    assert not modules and len(recorder.calls) == 1


def test_modules_are_tried_on_the_gpu_wherever_else_arrays_are(modules):
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    launch(kernel, [mx.zeros(8)], stream=mx.default_stream(mx.cpu))
    assert [call["stream"] for call in modules[:2]] == [mx.gpu] * 2


@pytest.mark.parametrize("kind", ["bool_", "int64", "bfloat16", "complex64"])
def test_modules_take_and_give_every_type(kind, modules):
    kernel = cuda.metal_kernel("k", ["x", "s"], ["y"], "y[0] = x[s > 0 ? 1 : 0];")
    dtype = getattr(mx, kind)
    kernel(
        inputs=[mx.zeros(8, dtype), True],
        output_shapes=[(64,)],
        output_dtypes=[dtype],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert modules


def test_numbers_are_inputs_of_modules(modules):
    kernel = cuda.metal_kernel("k", ["x", "s"], ["y"], "y[0] = x[0] * s;")
    launch(kernel, [mx.zeros(8), 2.0])
    assert modules[-1]["inputs"][1] == 2.0 and modules[-1]["scalars"] == [1]


def test_kernels_that_ask_for_strides_are_compiled_by_mlx(recorder, modules):
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[x_strides[0]];")
    launch(kernel, [mx.zeros(8)])
    assert not modules and len(recorder.calls) == 1


def test_modules_that_do_not_compile_say_where(modules):
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = oops;")
    with pytest.raises(ExecutorError, match=r"kernel k does not compile for sm_90a"):
        launch(kernel, [mx.zeros(8)])
    assert not modules


def test_without_nvrtc_mlx_compiles(monkeypatch):
    compiler, recorder = cuda_binary._compiler.__wrapped__, Recorder()
    monkeypatch.setattr(mx.fast, "cuda_kernel", recorder)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvrtc, "include_paths", nvrtc.include_paths.__wrapped__)
    monkeypatch.setattr(nvrtc, "_roots", lambda: [])
    monkeypatch.setattr(cuda_binary, "_compiler", compiler)
    launch(cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];"), [mx.zeros(8)])
    assert len(recorder.calls) == 1


def test_mlx_compiles_for_a_gpu_that_nvrtc_does_not_know(
    recorder, modules, monkeypatch
):
    monkeypatch.setattr(cuda_binary, "_compiler", lambda: ("sm_999a", (13, 0)))
    launch(cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];"), [mx.zeros(8)])
    assert not modules and len(recorder.calls) == 1


def test_an_nvrtc_that_does_not_load_is_as_none(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvrtc.so.13").write_bytes(b"of another machine")
    monkeypatch.setattr(nvrtc, "_roots", lambda: [tmp_path])
    with pytest.raises(nvrtc.NvrtcMissing):
        nvrtc.library.__wrapped__()


def test_bad_arguments_are_named(recorder):
    with pytest.raises(ValueError, match="at least one output"):
        cuda.metal_kernel("k", ["x"], [], "")
    kernel = cuda.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    with pytest.raises(ValueError, match="`inputs` to have size 1 but got size 2"):
        launch(kernel, [mx.zeros(8), mx.zeros(8)])
    with pytest.raises(ValueError, match="template argument N='a'"):
        launch(kernel, [mx.zeros(8)], template=[("N", "a")])
    with pytest.raises(TypeError, match="`grid` must be three ints"):
        launch(kernel, [mx.zeros(8)], grid=(64,))
