/** Which slow test files take longest: the run begins with them, so that no worker is left with one when all others have ended; and which waits. */

/** Eighteen seconds and more, the longest first: FOLDER/NAME of `*.slow.test.ts`, as KVTIER_TEST_COSTS tells them. */
export const longest = [
  ...[
    'src/cuda-kernels',
    'e2e/vllm-contract',
    'e2e/cluster-deaths',
    'e2e/python',
    'e2e/npm-start',
    'faults/redis-server',
  ],
  ...['sim/apart', 'sim/goodput', 'src/membership', 'e2e/shared-call', 'faults/s3-server', 'src/gpu-figures'],
  ...['src/replaced-model', 'src/gpu-session', 'e2e/sglang-contract', 'e2e/python-sanitized', 'faults/nonsense'],
  ...['faults/node-s3', 'faults/node-kill', 'e2e/cluster-redis', 'e2e/demo', 'e2e/up', 'redis/redis-tier'],
  ...['disk/removal', 'e2e/hand-off-faults', 'disk/kill', 'src/supervisor', 'redis/redis-strangers'],
];

/** By then what `npm test` compiles beside the tests has told it all that it would compile itself. */
export const last = ['src/cuda-spills'];

const named = (names: readonly string[], first: number): [string, number][] =>
  names.map((name, place) => [`${name}.slow.test.ts`, first + place]);
const places = new Map([...named(longest, 0), ...named(last, longest.length + 1)]);

/** Of a file, its place: `longest.length` for all that are not named. */
export const placeOf = (path: string): number => places.get(path.split('/').slice(-2).join('/')) ?? longest.length;
