// A thread block tells another one of the same launch that its partial sums are in memory.
//
// Three simpler ways have drawbacks. A flag in the workspace needs a memset before each launch,
// which takes 1 to 2 us (docs/notes/ragged.md), because the workspace holds anything when a launch
// begins, even the flags of the launch before. A number that the host gives to each launch does not
// tell two launches apart, because a CUDA graph launches with the parameters that it recorded. A
// handshake that is safe with stale memory needs both blocks to be running, which CUDA does not
// promise while other kernels hold a part of the device.
//
// Only a variable of the device is always in a known state: it is zero when the module is loaded,
// and then only this file writes it. Kernels that run at the same time share the variable, so it is
// a table of current announcements. An entry is zero, or the address of the sums that it announces:
//   - announce() claims an entry that is zero, and sums are announced once a launch.
//   - await() waits for the entry of its sums and makes it zero, once for each announcement.
// Therefore no entry names sums whose launch is over. Launches that run at the same time have
// different workspaces. The exception is a launch that begins before the launch before it has
// ended (`let_next_begin`); it announces and awaits only after `await_previous`. An entry that
// names the sums that a block waits for was therefore written by this launch, after the sums were.
//
// The workspace holds only a hint, which says where in the table to look. A hint counts only if the
// entry there names the right sums, so stale and random hints do no harm.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace jgg::sm90 {

// At most 128 kernels run on a device at a time, each with fewer than 300 announcements under way.
constexpr uint32_t kAnnouncements = 1 << 16;

// Each translation unit has its own table, because it does not see the kernels of other units.
static __device__ uint64_t announcements[kAnnouncements];

template <class T>
using DeviceAtomic = cuda::atomic_ref<T, cuda::thread_scope_device>;

// Announces `sums`. One thread calls it, after a barrier with the threads that wrote `sums`.
__device__ inline void announce(float const* sums, uint32_t* hint) {
  auto const name = reinterpret_cast<uint64_t>(sums);
  // Sums are at least 8 KB apart, so all sums of a launch begin their search at different entries.
  // A search tries one entry after the other. If eight sums began at the same entry, the last of
  // 264 blocks would try hundreds of entries.
  uint32_t entry = static_cast<uint32_t>(name >> 13) % kAnnouncements;
  uint64_t free = 0;
  while (!DeviceAtomic<uint64_t>(announcements[entry])
              .compare_exchange_strong(free, name, cuda::memory_order_release,
                                       cuda::memory_order_relaxed)) {
    free = 0;
    entry = (entry + 1) % kAnnouncements;
  }
  DeviceAtomic<uint32_t>(*hint).store(entry, cuda::memory_order_relaxed);
}

// Waits until `sums` are announced. One thread calls it, before a barrier with the threads that
// read `sums`.
__device__ inline void await(float const* sums, uint32_t* hint) {
  auto const name = reinterpret_cast<uint64_t>(sums);
  while (true) {
    uint32_t const entry = DeviceAtomic<uint32_t>(*hint).load(cuda::memory_order_relaxed);
    if (entry < kAnnouncements) {
      DeviceAtomic<uint64_t> const announcement(announcements[entry]);
      if (announcement.load(cuda::memory_order_acquire) == name) {
        announcement.store(0, cuda::memory_order_relaxed);
        return;
      }
    }
    __nanosleep(100);
  }
}

}  // namespace jgg::sm90
