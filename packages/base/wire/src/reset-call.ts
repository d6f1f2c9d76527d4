/** A call of a server that its client does not read: what is sent waits for the client, and so does its end, as long as it likes. */
import { constants } from 'node:http2';
import type { ServerDuplexStream } from '@grpc/grpc-js';

/** Cut off now, whatever of it was not read; its connection stays. The library has no word for that, so its HTTP/2 stream is reset. */
export function resetCall(call: ServerDuplexStream<never, never>): void {
  const { call: within } = call as { call?: { stream?: { close?(code: number): void } } };
  within?.stream?.close?.(constants.NGHTTP2_CANCEL);
  call.destroy();
}
