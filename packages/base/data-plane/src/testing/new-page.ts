/**
 * What a page of memory costs that is new to a process, on this machine: a microsecond where the processor keeps two tables of pages, ten to
 * ninety where a hypervisor keeps the second one in software or gives the memory by the page.
 */
import { native } from '../index.ts';

const pageBytes = 4096;
const measuredPages = 1024;
/** Larger than what an allocator keeps for another use: the kernel is asked each time. */
const freshBytes = 64 << 20;

/** To fill a page that is new to the process, on a processor of its own. */
const usualPageMs = 0.001;

/** CPU time that `pages` new ones took for no other reason than the machine: what is measured now, above what is usual. */
export function dearPagesMs(pages: number): number {
  return pages * Math.max(0, newPageMs() - usualPageMs);
}

/** In ms of CPU time of this thread; the median of three. */
function newPageMs(): number {
  const took = Array.from({ length: 3 }, () => {
    const fresh = Buffer.allocUnsafeSlow(freshBytes);
    const beganMs = native.threadCpuMs();
    fresh.fill(1, 0, measuredPages * pageBytes);
    return (native.threadCpuMs() - beganMs) / measuredPages;
  });
  return took.toSorted((a, b) => a - b)[1]!;
}
