/** What a page of memory costs that is new to this process, on this machine. */
import { native } from '@kvtier/data-plane';

const pageBytes = 4096;
const pages = 1024;
/** Larger than what an allocator keeps for another use: the kernel is asked each time. */
const freshBytes = 64 << 20;

/** In ms of CPU time of this thread; the median of three. */
export function newPageMs(): number {
  const took = Array.from({ length: 3 }, () => {
    const fresh = Buffer.allocUnsafeSlow(freshBytes);
    const beganMs = native.threadCpuMs();
    fresh.fill(1, 0, pages * pageBytes);
    return (native.threadCpuMs() - beganMs) / pages;
  });
  return took.toSorted((a, b) => a - b)[1]!;
}
