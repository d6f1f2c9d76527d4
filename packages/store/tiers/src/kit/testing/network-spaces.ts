/**
 * Two network namespaces with a veth pair between them, for tests that lose packets and narrow the way. Root only. Addresses:
 * 10.79.0.1 in `first`, 10.79.0.2 in `second`; after `lengthen` also 10.78.0.1 and 10.78.0.2, by a way that takes longer.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';

/** argv: two namespaces, seconds. One TUN device in each; what goes into one comes out of the other that much later. */
const longWay = `
import collections, ctypes, fcntl, os, select, struct, sys, time
libc, seconds = ctypes.CDLL(None, use_errno=True), float(sys.argv[3])
def tun(space):
    assert libc.setns(os.open("/var/run/netns/" + space, os.O_RDONLY), 0x40000000) == 0, ctypes.get_errno()
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x400454ca, struct.pack("16sH22s", b"far", 0x1001, b""))
    return device
ends, waiting = [tun(space) for space in sys.argv[1:3]], collections.deque()
print("up", flush=True)
while True:
    for end in select.select(ends, [], [], max(0, waiting[0][0] - time.monotonic()) if waiting else None)[0]:
        try: waiting.append((time.monotonic() + seconds, ends[end == ends[0]], os.read(end, 65536)))
        except BlockingIOError: pass
    while waiting and waiting[0][0] <= time.monotonic():
        _, end, packet = waiting.popleft()
        try: os.write(end, packet)
        except OSError: pass
`;

const run = (command: string, ...args: readonly string[]): void => {
  execFileSync(command, args, { stdio: ['ignore', 'ignore', 'pipe'] });
};

export class NetworkSpaces {
  readonly first = `kvt${process.pid}a`;
  readonly second = `kvt${process.pid}b`;
  #longWay: ChildProcess | undefined;

  /** Undefined where namespaces, nftables or the rights for them are not there; says so on stderr. */
  static open(): NetworkSpaces | undefined {
    const spaces = new NetworkSpaces();
    try {
      spaces.#make();
      return spaces;
    } catch (error) {
      process.stderr.write(
        `SKIPPED: packets lost between namespaces (needs root, ip and nft): ${(error as Error).message}\n`,
      );
      spaces.close();
      return undefined;
    }
  }

  #make(): void {
    run('ip', 'netns', 'add', this.first);
    run('ip', 'netns', 'add', this.second);
    run('ip', 'link', 'add', 'v1', 'netns', this.first, 'type', 'veth', 'peer', 'name', 'v2', 'netns', this.second);
    for (const [space, device, address] of [
      [this.first, 'v1', '10.79.0.1/24'],
      [this.second, 'v2', '10.79.0.2/24'],
    ] as const) {
      run('ip', '-n', space, 'addr', 'add', address, 'dev', device);
      run('ip', '-n', space, 'link', 'set', device, 'up');
      run('ip', '-n', space, 'link', 'set', 'lo', 'up');
      run('ip', 'netns', 'exec', space, 'nft', 'add', 'table', 'inet', 'loss');
      const hook = '{ type filter hook input priority 0; }';
      run('ip', 'netns', 'exec', space, 'nft', 'add', 'chain', 'inet', 'loss', 'input', hook);
    }
  }

  spawn(space: string, command: readonly string[]): ChildProcess {
    return spawn('ip', ['netns', 'exec', space, ...command], { stdio: ['pipe', 'pipe', 'inherit'] });
  }

  /** Of all packets, both ways; 0 to 100. */
  lose(percent: number): void {
    for (const space of [this.first, this.second]) {
      run('ip', 'netns', 'exec', space, 'nft', 'flush', 'chain', 'inet', 'loss', 'input');
      if (percent === 0) continue;
      const which = percent < 100 ? `numgen random mod 100 < ${percent} ` : '';
      const rule = `iifname != "lo" ${which}drop`;
      run('ip', 'netns', 'exec', space, 'nft', 'add', 'rule', 'inet', 'loss', 'input', rule);
    }
  }

  /** What leaves `first` is no more than this, as tc says it ("200mbit"); null: as much as will. */
  narrow(rate: string | null): void {
    const device = ['-n', this.first, 'qdisc', rate === null ? 'del' : 'replace', 'dev', 'v1', 'root'];
    run('tc', ...device, ...(rate === null ? [] : ['tbf', 'rate', rate, 'burst', '64kb', 'latency', '50ms']));
  }

  /** A second way, by TUN devices, that takes `ms` longer in each direction. False where there is no python3 or no TUN. */
  async lengthen(ms: number): Promise<boolean> {
    const args = ['-c', longWay, this.first, this.second, String(ms / 1000)];
    this.#longWay = spawn('/usr/bin/python3', args, { stdio: ['ignore', 'pipe', 'ignore'] });
    const said = await Promise.race([
      once(this.#longWay.stdout!, 'data'),
      once(this.#longWay, 'exit'),
      once(this.#longWay, 'error'),
    ]).catch(() => []);
    if (String(said[0]).trim() !== 'up') return false;
    for (const [space, address] of [
      [this.first, '10.78.0.1/24'],
      [this.second, '10.78.0.2/24'],
    ] as const) {
      run('ip', '-n', space, 'addr', 'add', address, 'dev', 'far');
      run('ip', '-n', space, 'link', 'set', 'far', 'up');
    }
    return true;
  }

  close(): void {
    this.#longWay?.kill('SIGKILL');
    for (const space of [this.first, this.second]) {
      try {
        run('ip', 'netns', 'del', space);
      } catch {
        // it was never made
      }
    }
  }
}
