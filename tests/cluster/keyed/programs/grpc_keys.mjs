// gRPC for Node with each key that it is given: the answer, or its code, details and trailing metadata.
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'

const [address, protos, keys] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4])]
const loaded = loader.loadSync('ryzanstein/v1/inference.proto', { includeDirs: [protos], longs: Number, enums: String })
const { InferenceService } = grpc.loadPackageDefinition(loaded).ryzanstein.v1
const client = new InferenceService(address, grpc.credentials.createInsecure())
const chat = { messages: [{ role: 'ROLE_USER', content: 'Count from 1 to 5.' }], sampling: { temperature: 0, maxTokens: 8 } }

const shown = (metadata, more) => ({
  limits: Object.keys(metadata.getMap()).filter(name => name.startsWith('x-ratelimit-')),
  details: metadata.get('grpc-status-details-bin').map(each => each.toString('base64'))[0],
  ...more,
})

function ask([name, key, stream]) {
  const metadata = new grpc.Metadata()
  if (key) metadata.set('authorization', `Bearer ${key}`)
  return new Promise(done => {
    const failed = error => done({ name, code: error.code, message: error.details, ...shown(error.metadata) })
    let text = ''
    if (stream) {
      const call = client.StreamChat({ chat }, metadata)
      call.on('data', response => { text += response.event.delta?.text ?? '' })
      call.on('error', failed)
      call.on('status', status => status.code || done({ name, code: 0, text, ...shown(status.metadata) }))
    } else {
      const call = client.Chat(chat, metadata, (error, response) => error ? failed(error) : (text = response.choices[0].text))
      call.on('status', status => setImmediate(() => status.code || done({ name, code: 0, text, ...shown(status.metadata) })))
    }
  })
}

for (const each of keys) console.log(JSON.stringify(await ask(each)))
client.close()
