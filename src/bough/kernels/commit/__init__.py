"""The commit of a tree's accepted path: its rows, and their K and V moved after the committed tokens."""

from bough.kernels.commit import reference
from bough.kernels.commit.reference import AcceptedPath
from bough.kernels.runtime.op import op

commit_path = op(reference.commit_path, "commit", triton="triton_kernels")
move_rows = op(reference.move_rows, "commit", triton="triton_kernels")
