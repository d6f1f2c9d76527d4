/** A call of ZeroMQ, made again for as long as a signal breaks it off: any may be, also one that does not wait (zmq_connect(3)). */
export async function uninterrupted<T>(call: () => Promise<T>): Promise<T> {
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'EINTR') throw error;
    }
  }
}
