"""`identity_program` with an S-worker on an emulated asynchronous device; rank 0 says on stderr what that did."""

import sys

import identity_program

import emulated_device
from fastdecode_hpc import run

DEVICES: list[emulated_device.EmulatedDevice] = []


def make_device(torch_device, *, cuda_graphs: str) -> emulated_device.EmulatedDevice:
    DEVICES.append(emulated_device.EmulatedDevice(use_graphs=cuda_graphs != "off"))
    return DEVICES[-1]


if __name__ == "__main__":
    run.make_device = make_device
    identity_program.main()
    for device in DEVICES:
        print("emulated:", device.num_copies, device.num_fetches, device.num_replays, file=sys.stderr)
