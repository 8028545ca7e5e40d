"""The rows of one slot on their way through the layers, in buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.s_part.base import BaseSPart, Pass
from fastdecode_hpc.s_part.device import Body, Device, Ready
from fastdecode_hpc.s_part.wire import WireCast
from fastdecode_hpc.transport.base import Ints


class SlotStages:
    """What the S-Part does to a mini-batch, stage by stage.

    Parameters
    ----------
    s_part : BaseSPart
    cast : WireCast
    device : Device
    max_rows : int

    Attributes
    ----------
    qkv, out : Twin
        Rows on their way to the R-workers and back, ``[max_rows, qkv_size]`` and ``[max_rows, q_size]``, of the wire
        type.

    Notes
    -----
    A step may be run with more rows than it has (`Device.padded`). These start as zeros and get zeros as attention
    output; rows don't see each other, and what becomes of them goes nowhere.
    """

    def __init__(self, s_part: BaseSPart, cast: WireCast, device: Device, max_rows: int) -> None:
        config = s_part.config
        self.qkv = device.make_twin(max_rows, config.qkv_size, cast.dtype)
        self.out = device.make_twin(max_rows, config.q_size, cast.dtype)
        self._last_layer, self._cast, self._device, self._max_rows = config.num_layers - 1, cast, device, max_rows
        self._pass = s_part.make_pass(max_rows)
        self._num_rows = self._padded = 0
        self._bodies: dict[tuple[int, int], Sequence[Body]] = {}  # by layer and padded number of rows

    def begin(self, token_ids: Sequence[int], positions: Ints) -> None:
        """Embed the newest token of each row of a new step.

        Parameters
        ----------
        token_ids : sequence of int
        positions : int64 array
            ``[num_rows]``
        """
        num_rows = self._num_rows = len(token_ids)
        self._padded = min(self._device.padded(num_rows), self._max_rows)
        ids, places = (self._device.put(torch.from_numpy(x)) for x in np.array([token_ids, positions], np.int64))
        self._pass.start(ids, places, self._padded)
        self.out.device[num_rows : self._padded].zero_()

    def bodies(self, layer: int) -> Sequence[Body]:
        """What brings the rows from one attention to the next: the second half of a layer and the first of `layer`."""
        key = layer, self._padded
        if key not in self._bodies:
            parts = [self._second_half(layer - 1, self._padded)] if layer else []
            parts.append(self._first_half(layer, self._padded))
            self._bodies[key] = self._device.record(parts, self._padded)
        return self._bodies[key]

    def send(self) -> Ready:
        """Start to bring q, k, v to the host; the result says when they are there."""
        return self._device.to_host(self.qkv, self._num_rows)

    def receive(self) -> None:
        """Start to bring attention output to the device, ahead of what is run next."""
        self._device.to_device(self.out, self._num_rows)

    def end(self) -> Tensor:
        """The second half of the last layer: ``[num_rows, hidden_size]``, input of the head."""
        self._second_half(self._last_layer, self._num_rows)()
        return self._pass.hidden[: self._num_rows]

    # Bodies hold the buffers, not this object that holds them: then all goes with the run, with no cycle to be found.

    def _first_half(self, layer: int, num_rows: int) -> Body:
        return partial(_pre_attention, self._pass, self._cast, layer, num_rows, self.qkv.device[:num_rows])

    def _second_half(self, layer: int, num_rows: int) -> Body:
        return partial(self._pass.post_attention, layer, self.out.device[:num_rows])


def _pre_attention(rows: Pass, cast: WireCast, layer: int, num_rows: int, qkv: Tensor) -> None:
    cast.round_into(rows.pre_attention(layer, num_rows), qkv)
