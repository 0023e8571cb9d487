"""Draft trees: the best tree of a size, and the path of a verified tree that the target accepts.

Rows are in order of worth, the root first, each after its parent. Padding rows have no parent (-1), see only
themselves and have weight -inf; acceptance never reaches them.
"""

from bough.kernels.runtime.op import op
from bough.kernels.tree import cpu
from bough.kernels.tree.cpu import pack_tree
from bough.kernels.tree.records import MAX_ROWS, Acceptance, Candidates, Correction, TreeForm

best_tree = op(cpu.best_tree, "tree building", triton="triton_kernels")
accept_path = op(cpu.accept_path, "tree building", triton="triton_kernels")
