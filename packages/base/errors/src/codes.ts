/**
 * The stable codes of `KvError`. Code that reacts to a failure matches on the code, never on the message.
 * The same list stands in docs/errors.md (tested both ways) and travels as `KvFailure.code` on the wire.
 */
export const codes = {
  CONFIG: 'the configuration or a command-line option cannot work',
  MODEL:
    'a model folder is missing, damaged, of a kind that is not served, or changed while an engine started on it (start again)',
  REQUEST: 'a request asks for something that cannot be served',
  TOO_LONG: 'a prompt, or prompt plus answer, exceeds the model or the block pool',
  CANCELLED: 'the caller ended the request',
  BUSY: 'a bounded queue is full; try again later',
  DEADLINE: 'a wait reached its deadline',
  CAPACITY: 'a tier has no space that may be taken now',
  CORRUPT: 'stored bytes do not match their header or checksum; the object was removed',
  IO: 'a device or file system refused an operation',
  LOCKED: 'another process holds the resource',
  PROTOCOL: 'the peer speaks another protocol version or broke the protocol',
  DISCONNECTED: 'the connection to the peer ended',
  GPU: 'the GPU is missing, full, or failed; after a fault the process that used it ends',
  SETUP: 'something the system needs is not installed or not permitted',
} as const;

export type KvErrorCode = keyof typeof codes;
