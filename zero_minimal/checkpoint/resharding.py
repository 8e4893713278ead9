"""Resharding: chunks go to files and come back, through torch.distributed.checkpoint (DCP).

    to save     each rank says which chunks it has, rank 0 checks that they are complete, each
                rank writes its own, and rank 0 records where each of them is
    to load     each rank says which chunks it wants, reads those of the files that overlap with
                them, and copies what both have in common

DCP runs these steps, finds the overlaps, tells all ranks if one of them fails, and saves in a
thread beside training. A program may replace its planners (SavePlanner, LoadPlanner) and its format
on the disk (StorageWriter, StorageReader).

We replace both. DCP's own files begin with a pickle, and pickle can run code. Ours are numbers and
JSON, have checksums, and get their name when they are complete (state_folder.py).

This module is imported when a state is saved or loaded: DCP takes seconds to import.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata, planner, storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import AsyncStager
from torch.futures import Future

from zero_minimal.checkpoint import as_json, state_folder
from zero_minimal.checkpoint.chunks import Chunk
from zero_minimal.checkpoint.local_chunks import LocalChunk
from zero_minimal.checkpoint.state_folder import Contents
from zero_minimal.core.layout import same_storage


class ChunkSaver(planner.SavePlanner):
    """Plans what a rank writes: all of its chunks.

    own: the facts that differ from rank to rank; the checkpoint's facts list all ranks' under
        "ranks_own".
    """

    def __init__(self, chunks: list[LocalChunk], own: dict):
        self.chunks, self.own = chunks, own
        self.last_of = {local.bucket: number for number, local in enumerate(chunks)}

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        pass

    def create_local_plan(self) -> planner.SavePlan:
        # rank 0 gets a few numbers a chunk: DCP's own items take longer to send than the writing
        sizes = [(local.name, local.shape, local.chunk.numel) for local in self.chunks]
        return planner.SavePlan([], planner_data=(sizes, self.own))

    def create_global_plan(self, all_plans):  # on rank 0
        missing = {}
        for plan in all_plans:
            for name, shape, numel in plan.planner_data[0]:
                missing[name] = missing.get(name, math.prod(shape)) - numel
        for name, numel in missing.items():
            if numel:
                raise ValueError(f"{name} is not whole: {numel} of its elements are on no rank")
        ranks_own = [plan.planner_data[1] for plan in all_plans]
        return [planner.SavePlan([]) for _ in all_plans], metadata.Metadata({}, ranks_own)

    def finish_plan(self, new_plan):
        """Make an item for each chunk again; its index holds the chunk's number."""
        kind = planner.WriteItemType.SHARD
        items = [planner.WriteItem(metadata.MetadataIndex(local.name, index=number), kind)
                 for number, local in enumerate(self.chunks)]
        return planner.SavePlan(items, new_plan.storage_data)

    def resolve_data(self, write_item) -> torch.Tensor:
        return self.chunks[write_item.index.index].tensor

    def written(self, write_item) -> LocalChunk:
        """Its bytes are written. After the last chunk of a bucket step() may change the bucket."""
        number = write_item.index.index
        local = self.chunks[number]
        if local.bucket is not None and self.last_of[local.bucket] == number:
            local.bucket.leaving.set()
        return local


class EmptySteps:
    """Steps of DCP's writers and readers in which ours do nothing."""

    def _nothing(self, *args, **kwargs):
        pass

    def _unchanged(self, plans):
        return plans

    reset = set_up_storage_writer = set_up_storage_reader = _nothing
    prepare_local_plan = prepare_global_plan = _unchanged

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


class Writer(EmptySteps, storage.StorageWriter, AsyncStager):
    """Writes each rank's chunks into its file, one after the other; rank 0 the contents, too.

    Args:
        folder: of all checkpoints. facts: for the contents; a step of None is one more than the
            newest's.
        keep: how many checkpoints the folder will have in the end.
    """

    # DCP would copy the whole state before training goes on. Here the update of each bucket waits
    # until its bytes are written, and nothing is copied
    should_synchronize_after_execute = False

    def stage(self, state_dict):
        return state_dict

    def __init__(self, folder: Path, facts: dict, keep: int):
        self.folder, self.facts, self.keep = folder, facts, keep
        self.own: Path | None = None  # on rank 0: where it is written
        self.warning = ""  # for the thread that waits

    def prepare_global_plan(self, plans):  # on rank 0, which says where to write
        if self.facts["step"] is None:
            self.facts["step"] = state_folder.next_step(self.folder)
        self.own, self.warning = state_folder.begin(self.folder, self.facts["step"])
        return [planner.SavePlan([], self.own / f"rank-{rank}.bin") for rank in range(len(plans))]

    def write_data(self, plan, planner) -> Future:
        file, chunks, checksums = plan.storage_data, [], []
        with open(file, "wb") as stream:
            for items, stretch in _side_by_side(plan.items, planner):
                held, place = as_json.bytes_of(stretch), stream.tell()
                for start in range(0, len(held), state_folder.BLOCK):  # the second read is cached
                    block = held[start : start + state_folder.BLOCK]
                    checksums.append((len(block), zlib.crc32(block)))
                    stream.write(block)
                for local in map(planner.written, items):
                    described = local.name, local.shape, as_json.name_of(local.tensor.dtype)
                    chunk = local.chunk
                    chunks.append((described, chunk.offsets, chunk.sizes, file.name, place))
                    place += local.tensor.nbytes
            state_folder.sync(stream)
        done = Future()
        done.set_result((file.name, checksums, chunks))
        return done

    def finish(self, metadata, results) -> None:  # on rank 0, when all ranks have written
        tensors, files = {}, {}
        for file, checksums, chunks in results:
            files[file] = checksums
            for (name, shape, dtype), *chunk in chunks:
                tensors.setdefault(name, {"shape": shape, "dtype": dtype, "chunks": []})
                tensors[name]["chunks"].append(chunk)
        facts = {**self.facts, "ranks_own": metadata.planner_data}
        state_folder.write_contents(Contents(self.own, facts, tensors, files))
        # DCP sends this to all ranks
        metadata.planner_data = state_folder.publish(self.own, self.facts["step"], self.keep)


def _side_by_side(items: list, planner: ChunkSaver) -> Iterator[tuple[list, torch.Tensor]]:
    """Items that are adjacent in memory, too, with all their elements, flat: to write them at once
    takes less time from training."""
    together, first, elements = [], None, 0
    for item in items:
        tensor = planner.resolve_data(item).cpu().contiguous()
        if first is not None and _follows(tensor, first, elements):
            together.append(item)
        else:
            if first is not None:
                yield together, first.as_strided((elements,), (1,))
            together, first, elements = [item], tensor, 0
        elements += tensor.numel()
    if first is not None:
        yield together, first.as_strided((elements,), (1,))


def _follows(tensor: torch.Tensor, first: torch.Tensor, elements: int) -> bool:
    """Whether a tensor begins `elements` elements after the beginning of `first`, in its memory."""
    is_next = tensor.storage_offset() == first.storage_offset() + elements
    return is_next and tensor.dtype == first.dtype and same_storage(tensor, first)


class ChunkLoader(DefaultLoadPlanner):
    """What to read for a rank's chunks: the saved ones that overlap with them."""

    def __init__(self, chunks: list[LocalChunk]):
        super().__init__()
        self.chunks = {metadata.MetadataIndex(local.name, local.chunk.offsets): local
                       for local in chunks}

    def create_local_plan(self) -> planner.LoadPlan:
        items, described = [], self.metadata.state_dict_metadata
        for index, local in self.chunks.items():
            chunk = _dcp_chunk(local.chunk.offsets, local.chunk.sizes)
            overlaps = create_read_items_for_chunk_list(index.fqn, described[index.fqn], [chunk])
            found = sum(item.lengths.numel() for item in overlaps)
            if found != local.chunk.numel:
                raise ValueError(f"{index.fqn} is not whole in this checkpoint: of a chunk of "
                                 f"{local.chunk.numel} elements it has {found}")
            items += overlaps
        return planner.LoadPlan(items)

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        """The chunk to which an overlap is to go."""
        return self.chunks[index].tensor


class Reader(EmptySteps, storage.StorageReader):
    """Reads the wanted rows of each chunk."""

    def __init__(self, contents: Contents):
        self.contents, self.chunks = contents, {}
        for name, tensor in contents.tensors.items():
            for offsets, sizes, file, offset in tensor["chunks"]:
                index = metadata.MetadataIndex(name, offsets)
                self.chunks[index] = contents.folder / file, offset, sizes, tensor["dtype"]

    def read_metadata(self) -> metadata.Metadata:
        return metadata.Metadata({
            name: metadata.TensorStorageMetadata(
                metadata.TensorProperties(as_json.dtype_of(tensor["dtype"])),
                torch.Size(tensor["shape"]),
                [_dcp_chunk(offsets, sizes) for offsets, sizes, *_ in tensor["chunks"]],
            ) for name, tensor in self.contents.tensors.items()
        })

    def read_data(self, plan, planner) -> Future:
        for item in plan.items:
            file, offset, sizes, dtype = self.chunks[item.storage_index]
            part = _read(file, offset, sizes, as_json.dtype_of(dtype), item)
            planner.resolve_tensor(item).copy_(part)
        done = Future()
        done.set_result(None)
        return done


def _read(file: Path, offset: int, sizes: list, dtype: torch.dtype, item) -> torch.Tensor:
    """The wanted part of a chunk in a file; only the wanted rows are read."""
    first, rows = item.storage_offsets[0], item.lengths[0]
    row = dtype.itemsize * torch.Size(sizes[1:]).numel()
    held = bytearray(rows * row)
    with open(file, "rb") as stream:
        stream.seek(offset + first * row)
        if stream.readinto(held) != len(held):
            raise state_folder.Damaged(f"{file} is truncated")
    part = torch.frombuffer(held, dtype=dtype).view(rows, *sizes[1:])
    return Chunk((0, *item.storage_offsets[1:]), item.lengths).of(part)


def _dcp_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> metadata.ChunkStorageMetadata:
    """What DCP calls a chunk."""
    return metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
