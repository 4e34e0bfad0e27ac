"""Which format a page has by its age: the policies that ``accuracy.py`` compares."""

import dataclasses

from config import SMOLLM2_135M

from onnx_inplace import formats
from onnx_inplace.compiler.formats import PageFormat

PAGE_SIZE = 128  # [tokens]


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Which format a page has, by its age in pages.

    Attributes:
        name: what it is called here.
        tiers: format of the newest pages, and of how many of them; one after the other.
        rest: format of all older pages.
        first: format that the first page keeps for good; None: it ages like the others.
        bound: largest mean KL divergence that it may have; None: it is shown only.
        page_size: [tokens].

    Raises:
        ValueError: the newest page would have a format that is written best as a whole page.
    """

    name: str
    tiers: tuple[tuple[PageFormat, int], ...]
    rest: PageFormat
    first: PageFormat | None = None
    bound: float | None = None
    page_size: int = PAGE_SIZE

    def __post_init__(self) -> None:
        if not self.chain[0].appendable:
            raise ValueError(f"{self.name}: the newest page fills token by token")

    @property
    def chain(self) -> list[PageFormat]:
        """The formats that a page goes through, in order."""
        return [*(page_format for page_format, _ in self.tiers), self.rest]

    def stage(self, age: int) -> int:
        """The place in the chain of a page that is ``age`` pages behind the newest one."""
        for stage, (_, pages) in enumerate(self.tiers):
            if age < pages:
                return stage
            age -= pages
        return len(self.tiers)

    def format(self, page: int, newest: int) -> PageFormat:
        """Of a page, while ``newest`` is the page that is filled."""
        if page == 0 and self.first is not None:
            return self.first
        return self.chain[self.stage(newest - page)]

    def bits(self, tokens: int) -> float:
        """Bits per element of a cache of so many tokens, scales and padding included."""
        pages = tokens // self.page_size
        dims = 2, SMOLLM2_135M.kv_heads, self.page_size, SMOLLM2_135M.head_size
        chosen = [self.format(page, pages - 1) for page in range(pages)]
        return sum(page_format.bits_per_element(dims) for page_format in chosen) / pages


FLOAT16, INT8, INT4, INT2 = formats.FLOAT16, formats.INT8, formats.INT4, formats.INT2
# What a user may add: formats of the same vocabulary.
K8V4 = PageFormat("K8V4", formats.INT8.key, formats.INT4.value)
K4V2 = PageFormat("K4V2", formats.INT4.key, formats.INT2.value)
POLICIES = (
    Policy("FLOAT16", (), FLOAT16),
    Policy("INT8", (), INT8, bound=0.001),
    Policy("INT4; newest, first FLOAT16", ((FLOAT16, 1),), INT4, FLOAT16, bound=0.004),
    Policy("INT4; newest, first INT8", ((INT8, 1),), INT4, INT8, bound=0.006),
    Policy("FLOAT16 x1, INT8 x2, INT4", ((FLOAT16, 1), (INT8, 2)), INT4, FLOAT16, bound=0.002),
    Policy("FLOAT16 x1, INT4 x3, INT2", ((FLOAT16, 1), (INT4, 3)), INT2, FLOAT16, bound=0.025),
    Policy("64: INT8 x2, INT4", ((INT8, 2),), INT4, INT8, page_size=64),
    Policy("64: FLOAT16 x2, INT4", ((FLOAT16, 2),), INT4, FLOAT16, page_size=64),
    Policy("64: INT8 x2, INT4 x6, INT2", ((INT8, 2), (INT4, 6)), INT2, INT8, page_size=64),
    Policy("32: INT8 x4, INT4", ((INT8, 4),), INT4, INT8, page_size=32),
    Policy("INT2; newest 4, first FLOAT16", ((FLOAT16, 4),), INT2, FLOAT16, bound=0.02),
    Policy("INT4T", (), formats.INT4T),
    Policy("INT4T; first FLOAT16", (), formats.INT4T, FLOAT16),
    Policy("FP8_E4M3", (), formats.FP8_E4M3),
    Policy("K8V4", (), K8V4),
    Policy("K4V2; newest, first FLOAT16", ((FLOAT16, 1),), K4V2, FLOAT16),
)
