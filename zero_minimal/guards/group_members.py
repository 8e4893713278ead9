"""A rank that is not in a group may start no collective of it.

Seam: collective.
"""

import torch.distributed as dist

from zero_minimal.core import seams
from zero_minimal.core.work import Call


@seams.at("collective")
def refuse_strangers(moment: str, call: Call) -> None:
    """Raises: ValueError on a rank that is not in the group."""
    if call.group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{call.name}: this rank, {dist.get_rank()} of the world, is not in "
                         "group=: call it on the ranks of the group alone")
