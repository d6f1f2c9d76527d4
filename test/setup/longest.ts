/** Which slow test files take longest: the run begins with them, so that no worker is left with one when all others have ended; and which waits. */

/** Twenty seconds and more, the longest first: FOLDER/NAME of `*.slow.test.ts`, as KVTIER_TEST_COSTS tells them. */
export const longest = [
  ...['e2e/python', 'e2e/vllm-contract', 'e2e/cluster-deaths', 'src/cuda-kernels', 'sim/apart', 'sim/goodput'],
  ...['src/membership', 'faults/redis-server', 'e2e/npm-start', 'e2e/shared-call', 'src/replaced-model'],
  ...['faults/node-s3', 'faults/node-kill', 'src/gpu-session', 'faults/s3-server', 'e2e/sglang-contract'],
  ...['e2e/cluster-redis', 'disk/kill', 'faults/nonsense', 'src/text-pool', 'e2e/up', 'peer/network'],
  ...['e2e/hand-off-faults', 'disk/removal', 'redis/redis-tier', 'faults/gpu-worker', 'src/supervisor'],
];

/** By then what `npm test` compiles beside the tests has told it all that it would compile itself. */
export const last = ['src/cuda-spills'];

const named = (names: readonly string[], first: number): [string, number][] =>
  names.map((name, place) => [`${name}.slow.test.ts`, first + place]);
const places = new Map([...named(longest, 0), ...named(last, longest.length + 1)]);

/** Of a file, its place: `longest.length` for all that are not named. */
export const placeOf = (path: string): number => places.get(path.split('/').slice(-2).join('/')) ?? longest.length;
