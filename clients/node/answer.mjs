// Reads an answer to its end, whichever routers and connections are lost meanwhile:
//   npm install && node answer.mjs 127.0.0.1:50051,127.0.0.1:50053 "Count from 1 to 40."
// A begin has a key, so that it may be sent again; a started answer is attached to at the next index, at the next router.
import { randomUUID } from 'node:crypto'
import { fileURLToPath } from 'node:url'
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'

const PROTOS = process.env.RYZANSTEIN_PROTOS ?? fileURLToPath(new URL('../../protos', import.meta.url))
const PATIENCE_MS = 30_000
const LOST = new Set([grpc.status.UNAVAILABLE, grpc.status.UNKNOWN, grpc.status.CANCELLED, grpc.status.INTERNAL])
const OPTIONS = { 'grpc.enable_retries': 0, 'grpc.keepalive_time_ms': 10_000, 'grpc.keepalive_timeout_ms': 5_000 }

const load = path => loader.loadSync(path, { includeDirs: [PROTOS], enums: String, longs: Number, defaults: true })
const { InferenceService } = grpc.loadPackageDefinition(load('ryzanstein/v1/inference.proto')).ryzanstein.v1

// How long a server asks to wait, in milliseconds, from the RetryInfo of its status; undefined: it asks for nothing.
function retryAfter (error) {
  const [bytes] = error.metadata?.get('grpc-status-details-bin') ?? []
  const at = bytes?.indexOf('google.rpc.RetryInfo') ?? -1
  if (at < 0) return undefined
  // Any { type_url; value: RetryInfo { retry_delay: Duration { seconds = 1; nanos = 2 } } }, numbers as varints.
  const [seconds, nanos] = duration(bytes.subarray(at + 'google.rpc.RetryInfo'.length + 4))
  return seconds * 1000 + nanos / 1e6
}

function duration (bytes) {
  const found = [0, 0]
  for (let at = 0; at < bytes.length && (bytes[at] === 8 || bytes[at] === 16);) {
    const field = bytes[at++] >> 3
    let value = 0
    for (let shift = 0; ; shift += 7) {
      value += (bytes[at] & 127) * 2 ** shift
      if (!(bytes[at++] & 128)) break
    }
    found[field - 1] = value
  }
  return found
}

const sleep = ms => new Promise(resolve => setTimeout(resolve, ms))

export async function * answer (addresses, content) {
  const clients = addresses.map(address => new InferenceService(address, grpc.credentials.createInsecure(), OPTIONS))
  const chat = { messages: [{ role: 'ROLE_USER', content }], sampling: { temperature: 0 }, requestId: randomUUID() }
  let [generationId, next, router, failures, since] = ['', 0, 0, 0, 0]
  try {
    for (;;) {
      const client = clients[router % clients.length]
      const call = generationId
        ? client.AttachGeneration({ generationId, fromIndex: { 0: next } })
        : client.StreamChat({ chat })
      try {
        for await (const { event } of call) {
          failures = 0
          if (event.started) generationId = event.started.generationId
          if (event.finished) {
            yield event.finished.text
            return
          }
          if (event.delta) {
            if (event.delta.firstIndex !== next) throw new Error(`index ${event.delta.firstIndex} came instead of ${next}`)
            next += event.delta.tokenIds.length
            yield event.delta.text
          }
        }
      } catch (error) {
        const waits = retryAfter(error)
        if (waits === undefined && !LOST.has(error.code)) throw error
        since = failures ? since : Date.now()
        if (Date.now() - since > PATIENCE_MS) throw error
        failures += 1
        router += 1
        await sleep(Math.max(waits ?? 0, Math.random() * Math.min(2000, 50 * 2 ** failures)))
      } finally {
        call.cancel()
      }
    }
  } finally {
    for (const client of clients) client.close()
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  for await (const text of answer(process.argv[2].split(','), process.argv[3])) process.stdout.write(text)
  process.stdout.write('\n')
}
