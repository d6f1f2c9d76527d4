/**
 * W3C's trace context, by which log lines of several processes, and of what stands before and behind them, are found as one request.
 * https://www.w3.org/TR/trace-context/
 */

/** Version, trace, parent, flags, in 55 characters; undefined: there is none, or it is none. */
export function traceparentOf(value: unknown): string | undefined {
  if (typeof value !== 'string' || !/^(?!ff)[\da-f]{2}-[\da-f]{32}-[\da-f]{16}-[\da-f]{2}$/.test(value))
    return undefined;
  return /^..-0{32}-|-0{16}-..$/.test(value) ? undefined : value;
}
