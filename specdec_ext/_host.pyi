from typing import TypedDict

class BuildInfo(TypedDict):
    compiler: str
    cxx_standard: int
    build_type: str
    cpu_variants: list[str]
    torch: str
    torch_cuda: str

def build_info() -> BuildInfo: ...
