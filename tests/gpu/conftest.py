import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("gpu"))  # one after the other: some fill the GPU's memory
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
