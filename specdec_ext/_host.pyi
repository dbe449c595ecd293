from typing import TypedDict

class BuildInfo(TypedDict):
    compiler: str
    cxx_standard: int
    build_type: str
    cpu_variants: list[str]
    cuda_compiler: str
    cuda_left_out: str
    torch: str
    torch_cuda: str

def build_info() -> BuildInfo: ...
