module ryzanstein/answer

go 1.22

require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20240903143218-8af14fe29dc1
	google.golang.org/grpc v1.66.2
	google.golang.org/protobuf v1.34.2
	ryzanstein/v1 v0.0.0
)

replace ryzanstein/v1 => ./stubs/ryzanstein/v1
